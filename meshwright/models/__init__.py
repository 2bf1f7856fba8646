"""Model descriptions: architectures, presets and counts. Shared by planner and worker, and without I/O or torch."""
