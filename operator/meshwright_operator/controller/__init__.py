"""The control loop: observe, decide, act, write the status."""
