"""What must hold for a spec and a resolved run. Each rule is stated once, with its condition in CEL and in Python."""
