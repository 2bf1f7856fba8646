"""`meshwright plan`: the operator's planning and placement, without a cluster."""
