"""Errors of training data."""

from __future__ import annotations


class DataError(ValueError):
    """The training data cannot be read. The message names the field, the file and the fix."""


class CorruptRecordError(DataError):
    """One record cannot be read. The message names file and line."""
