"""Pipeline parallelism: runs the micro-batches of a step through the stages of a replica."""
