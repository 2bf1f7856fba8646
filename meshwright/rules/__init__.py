"""What a spec and a resolved run must hold: each rule once, with its condition in CEL and in Python."""
