"""Sources of the control plane: embedded in this process, real binaries, or an existing cluster."""
