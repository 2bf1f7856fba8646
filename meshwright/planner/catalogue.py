"""GPU memory by product name, for nodes whose labels name the product but not its memory."""

from __future__ import annotations

_GIB = 1 << 30

# (whole words of `nvidia.com/gpu.product`, bytes). First match wins, so longer names stand before their prefixes.
_MEMORY = (
    ("GB300", 279 * _GIB),
    ("GB200", 185 * _GIB),
    ("B200", 179 * _GIB),
    ("GH200-480GB", 95 * _GIB),
    ("H200", 140 * _GIB),
    ("H100-NVL", 93 * _GIB),
    ("H100", 79 * _GIB),
    ("H800", 79 * _GIB),
    ("H20", 95 * _GIB),
    ("A100-SXM4-80GB", 80 * _GIB),
    ("A100-80GB", 80 * _GIB),
    ("A100-PCIE-80GB", 80 * _GIB),
    ("A100", 39 * _GIB),
    ("A800", 79 * _GIB),
    ("L40S", 45 * _GIB),
    ("L40", 45 * _GIB),
    ("L4", 22 * _GIB),
    ("A10G", 22 * _GIB),
    ("A10", 22 * _GIB),
    ("V100-SXM2-32GB", 32 * _GIB),
    ("V100", 16 * _GIB),
    ("T4", 15 * _GIB),
)


def gpu_memory_bytes(product: str) -> int | None:
    """Usable memory of one GPU of this product, rounded down to what drivers report; None for an unknown product."""
    words = f"-{product.upper()}-"
    return next((size for part, size in _MEMORY if f"-{part}-" in words), None)
