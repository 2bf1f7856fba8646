"""A module of one's own, trained in parallel: a plan says how it is split, `CustomModuleTrainer` does the rest."""
