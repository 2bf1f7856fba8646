"""From a spec and the cluster's nodes to a plan (degrees, schedule) and a placement (worker to node). Pure."""
