"""The coordinator: serves the mesh document to worker agents, and receives their reports."""
