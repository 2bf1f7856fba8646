"""What a rank computes on: its device, the mesh of process groups, collectives."""
