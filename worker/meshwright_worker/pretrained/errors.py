"""Errors of pretrained weights."""

from __future__ import annotations


class PretrainedError(ValueError):
    """Pretrained weights that cannot be used. The message names the file or field and the fix."""
