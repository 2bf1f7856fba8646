"""Generation from a checkpoint, in one process or with the model split over ranks."""
