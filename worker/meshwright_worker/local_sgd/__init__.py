"""Islands of replicas that train separately and synchronize once per round: one module per method."""
