"""Checkpoints that are complete and verified, or invisible."""
