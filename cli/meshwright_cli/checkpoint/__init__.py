"""`meshwright checkpoint`: the checkpoints of a job."""
