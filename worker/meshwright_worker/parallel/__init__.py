"""How one stage of the model is split over ranks: tensor parallelism and data parallelism."""
