"""Recovery in memory: ranks keep their processes and state when others are lost, and train on with new groups."""
