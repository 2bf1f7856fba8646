"""`meshwright import`: reads the configuration of another framework as a job."""
