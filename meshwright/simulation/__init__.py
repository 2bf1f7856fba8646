"""Months of a job in simulated time: how much of them is useful with failures, recoveries and checkpoints. Pure."""
