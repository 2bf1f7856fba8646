"""Islands of replicas that train apart and meet rarely: one module a method."""
