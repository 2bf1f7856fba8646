"""The training text as a deterministic stream of samples."""
