"""The training loop and one training step."""
