"""Expert parallelism: dispatching tokens to the ranks of their experts."""
