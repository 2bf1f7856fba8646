"""The ids of a job's runs in services, and the last step that each got: they survive restarts of ranks and pods."""

from __future__ import annotations

import json
import os
import threading
import uuid
from pathlib import Path
from typing import Any

NAME = "runs.json"
_WRITING = threading.Lock()
"""Services have a thread each."""


class RunState:
    """A small file next to the trackers' other files."""

    def __init__(self, directory: str) -> None:
        self._path = Path(directory) / NAME

    def run_id(self) -> str:
        """Return the id of the job's run, the same one at each start."""
        return str(self.get("id") or self.put("id", uuid.uuid4().hex))

    def get(self, name: str) -> Any:
        """Return a value, or None."""
        return self._read().get(name)

    def put(self, name: str, value: Any) -> Any:
        """Store a value next to those of other trackers, and return it. A reader never sees half of the file."""
        temporary = self._path.with_suffix(".writing")
        with _WRITING:
            temporary.write_text(json.dumps(self._read() | {name: value}), encoding="utf-8")
            os.replace(temporary, self._path)
        return value

    def _read(self) -> dict[str, Any]:
        try:
            content = json.loads(self._path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return content if isinstance(content, dict) else {}
