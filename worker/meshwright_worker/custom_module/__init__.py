"""Parallel training of a custom module: a plan says how it is split, `CustomModuleTrainer` trains it."""
