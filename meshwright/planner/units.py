"""Units of bytes, the size of an element, and bytes as text for people."""

from __future__ import annotations

from meshwright.api.precision import Precision
from meshwright.figures import counted, format_number

GB = 1e9
MIB = float(1 << 20)
GIB = float(1 << 30)
FP32_BYTES = Precision.FP32.bytes

_UNITS = ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


def format_bytes(count: float) -> str:
    """Format bytes of memory with three digits: `12.3 GiB`; four from 1,000 to 1,023."""
    for unit, name in _UNITS:
        if count >= unit:
            return f"{format_number(count / unit)} {name}"
    return f"{format_number(count)} B"


def count_gpus(count: int) -> str:
    """Return a number of GPUs as text."""
    return counted(count, "GPU")
