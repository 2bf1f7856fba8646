"""What the user's command reports about its progress: in a file that the agent reads, or in its log."""
