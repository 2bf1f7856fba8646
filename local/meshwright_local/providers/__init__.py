"""Where the control plane comes from: embedded in this process, real binaries, or a cluster that exists."""
