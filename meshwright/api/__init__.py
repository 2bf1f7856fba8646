"""The ParallelTrainingJob API: the one source of CRD, operator, worker and command line."""
