"""How the micro-batches of a step run through the stages of a replica."""
