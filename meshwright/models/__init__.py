"""Model descriptions: architectures, presets and counts. Pure: planner and worker share them."""
