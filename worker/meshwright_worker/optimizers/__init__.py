"""Optimizers of one rank: each updates the shards of its rank."""
