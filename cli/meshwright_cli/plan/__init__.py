"""`meshwright plan`: the operator's own planning and placing, without a cluster."""
