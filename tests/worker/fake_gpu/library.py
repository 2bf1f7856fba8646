"""Builds a CUDA device without a driver for the installed torch: its streams and events do nothing.

torch's build for CPUs knows the device, but cannot run autograd on it. The library must be loaded before torch, in a
process of its own, which then has a GPU for good.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import subprocess
import tempfile
from pathlib import Path

SOURCE = Path(__file__).with_name("cuda_device.cpp")


def library() -> Path:
    """The library, built if there is none yet for this torch."""
    found = importlib.util.find_spec("torch")
    assert found is not None
    assert found.origin is not None
    directory = Path(found.origin).parent
    version = (directory / "version.py").read_bytes()
    name = hashlib.sha256(SOURCE.read_bytes() + version + str(directory).encode()).hexdigest()[:16]
    built = Path(tempfile.gettempdir()) / f"meshwright-fake-gpu-{os.getuid()}-{name}.so"
    if not built.exists():
        unfinished = built.with_suffix(f".{os.getpid()}")
        libraries = directory / "lib"
        command = [os.environ.get("CXX", "g++"), "-std=c++20", "-shared", "-fPIC", f"-I{directory / 'include'}"]
        command += [str(SOURCE), "-o", str(unfinished), f"-L{libraries}", f"-Wl,-rpath,{libraries}"]
        subprocess.run([*command, "-lc10", "-ltorch_cpu"], check=True)
        unfinished.rename(built)
    return built
