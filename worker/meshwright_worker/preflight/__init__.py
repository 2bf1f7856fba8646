"""Checks of a worker pod before its ranks start: network, memory, CPUs, clock, volume and GPUs.

A finding names what is wrong, and its fix. The agent reports findings to the coordinator; what follows from them is the
operator's decision (`spec.preflight`).
"""
