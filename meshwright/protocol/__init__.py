"""Messages between operator and workers, and how they are signed."""
