"""What stands beside the numbers of a benchmark that are kept."""

from __future__ import annotations

import platform
import subprocess
from datetime import UTC, datetime

import torch


def circumstances(device: str) -> dict[str, object]:
    """What a result depends on and a reader cannot see."""
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    on_gpu = device == "cuda"
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "commit": commit,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "device": torch.cuda.get_device_name() if on_gpu else platform.machine(),
        **({"cuda": torch.version.cuda} if on_gpu else {}),
    }
