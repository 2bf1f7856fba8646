"""What the pods of a job keep of a profile."""
