"""The version this server reports: the Kubernetes release whose behaviour it follows, marked as embedded."""

from __future__ import annotations

import platform
from typing import Any

MAJOR, MINOR = "1", "36"
GIT_VERSION = f"v{MAJOR}.{MINOR}.0-meshwright-embedded"


def version_info() -> dict[str, Any]:
    """The document under `/version`."""
    return {
        "major": MAJOR,
        "minor": MINOR,
        "gitVersion": GIT_VERSION,
        "gitCommit": "",
        "gitTreeState": "",
        "buildDate": "1970-01-01T00:00:00Z",
        "goVersion": "",
        "compiler": f"Python {platform.python_version()}",
        "platform": f"linux/{platform.machine()}",
    }
