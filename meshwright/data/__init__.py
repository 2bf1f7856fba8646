"""Training text, from files to rows of tokens: what the worker reads and `meshwright data` prepares. Knows no torch."""
