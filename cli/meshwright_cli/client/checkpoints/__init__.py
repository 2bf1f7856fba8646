"""Uses a job's checkpoints where they are, in a pod next to them: generates text, and exports the model."""
