"""Plans of jobs, made in other processes, with a deadline."""
