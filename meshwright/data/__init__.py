"""Training text, from files to rows of tokens: read by the runtime, prepared by `meshwright data`. Imports no torch."""
