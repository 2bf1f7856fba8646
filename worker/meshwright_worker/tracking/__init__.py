"""Experiment trackers: rank 0 passes each step to a separate process, which writes to files and services."""
