"""One training process: how it starts, reports and fails."""
