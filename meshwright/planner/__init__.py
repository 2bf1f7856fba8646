"""Plans and places a job: from a spec and the cluster's nodes to a plan (degrees, schedule) and a placement. Pure."""
