"""The node agent: a simulated node whose pods are processes of this machine."""
