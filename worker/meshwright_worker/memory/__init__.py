"""Techniques that reduce a rank's accelerator memory."""
