"""Matrix products in 8-bit floating point (arXiv 2209.05433)."""
