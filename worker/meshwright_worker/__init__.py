"""The worker: agent and ranks of one pod."""
