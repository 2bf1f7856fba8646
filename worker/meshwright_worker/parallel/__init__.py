"""Splits one stage of the model over ranks: tensor, context, expert, data and pipeline parallelism."""
