"""`meshwright doctor`: checks that a cluster can run jobs, and names the fix of each problem."""
