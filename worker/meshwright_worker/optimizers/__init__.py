"""Optimizers of one rank: each works on the shards that the rank holds."""
