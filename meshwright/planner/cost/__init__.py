"""Estimates memory of every rank and the time of a step for a layout: closed forms with a few fitted constants."""
