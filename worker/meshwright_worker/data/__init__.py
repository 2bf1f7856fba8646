"""The corpus as a deterministic stream of samples."""
