"""Figures as SVG: pipelines, and what the other commands draw."""
