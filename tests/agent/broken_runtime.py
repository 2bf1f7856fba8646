"""A training runtime that cannot be loaded: what a broken CUDA library does to torch."""

from __future__ import annotations


def preload() -> None:
    raise OSError("libcudart.so.12: cannot open shared object file")
