"""Profiles chosen steps of a running rank with torch's profiler. A request is a file in the pod; so is the trace.

`meshwright profile` writes the request with a command in the pod. So a profile needs no restart, and nothing from the
operator. A rank looks for a request before each step, which takes microseconds. A request that cannot be served, such
as for a step that is over, is answered with an error. No request stops training. A request stays until it is deleted,
so a rank that starts again serves it if its steps are still to come.

The profiler is prepared one step before the first one that is traced: this takes up to seconds, for which other ranks
wait. The trace is written by a thread, while training continues.
"""

from __future__ import annotations

import gzip
import json
import logging
import os
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from meshwright.api.labels import MAX_PROFILED_STEPS, PROFILE_DIRECTORY, PROFILE_REQUEST

log = logging.getLogger(__name__)

_CLOSE_SECONDS = 60.0


@dataclass(slots=True)
class _Session:
    """A request that is being served."""

    name: str
    first: int
    last: int
    profiler: Any = None
    mark: Any = None
    """The annotation of the step that runs, once steps are traced."""
    ends: list[tuple[int, int]] = field(default_factory=list)
    """Step, and when this rank completed it, in ns since 1970."""


class StepProfiler:
    """Serves the requests to one rank. Call `before` and `after` around each step.

    Args:
        rank: the rank.
        synchronous: whether all ranks complete each step together. Then the ends of steps show by how much the clocks
            of nodes differ.
        directory: the directory of requests and traces.
    """

    def __init__(self, rank: int, *, synchronous: bool = True, directory: Path | None = None) -> None:
        self._rank = rank
        self._synchronous = synchronous
        self._directory = directory or Path(tempfile.gettempdir()) / PROFILE_DIRECTORY
        self._request = str(self._directory / PROFILE_REQUEST)
        self._seen = 0
        self._session: _Session | None = None
        self._writer: threading.Thread | None = None

    def before(self, step: int) -> None:
        """The step is about to begin."""
        modified = self._modified()
        if modified != self._seen:
            self._seen = modified
            if modified:
                self._accept(step)
            elif self._session is not None and self._session.profiler is None:
                self._session = None  # deleted: nobody waits for these steps any more
        session = self._session
        if session is not None and step >= session.first - 1:
            try:
                self._begin(session, step)
            except RuntimeError as error:  # such as another profiler that runs
                self._fail(session, str(error))

    def after(self, step: int) -> None:
        """The step is complete."""
        session = self._session
        if session is None or session.mark is None:
            return
        session.mark.__exit__(None, None, None)
        session.ends.append((step, time.time_ns()))
        if step < session.last:
            return
        self._session = None
        try:
            session.profiler.add_metadata_json("meshwright", json.dumps(self._metadata(ends=session.ends)))
            session.profiler.stop_trace()
        except RuntimeError as error:
            self._answer(session.name, str(error))
            return
        self._writer = threading.Thread(target=self._write, args=(session,), name="profile", daemon=True)
        self._writer.start()

    def close(self) -> None:
        """Training is over: answer the request that waits, and wait for the trace that is being written."""
        if self._session is not None:
            self._fail(self._session, "training stopped before the last of these steps")
        if self._writer is not None:
            self._writer.join(_CLOSE_SECONDS)

    def _modified(self) -> int:
        try:
            return os.stat(self._request).st_mtime_ns
        except OSError:
            return 0

    def _begin(self, session: _Session, step: int) -> None:
        if session.profiler is None:
            activities = [torch.profiler.ProfilerActivity.CPU]
            activities += [torch.profiler.ProfilerActivity.CUDA] if torch.cuda.is_available() else []
            session.profiler = torch.profiler.profile(activities=activities)
            session.profiler.prepare_trace()
        if step < session.first:
            return
        if session.mark is None:
            session.profiler.start_trace()
        session.mark = torch.profiler.record_function(f"step {step}")
        session.mark.__enter__()

    def _accept(self, step: int) -> None:
        try:
            request = json.loads(Path(self._request).read_bytes())
            name, first, last = str(request["name"]), int(request["first"]), int(request["last"])
            asked = self._rank in request["ranks"] and name.isalnum()
        except (OSError, ValueError, KeyError, TypeError) as error:
            log.warning("a profile request cannot be read: %s", error)
            return
        if not asked:
            return
        session = self._session
        if session is not None and session.profiler is not None:
            self._answer(name, "another profile is being taken: try again when it is complete")
        elif step > first:
            self._answer(name, f"step {first} is over: the next one is {step}")
        elif not first <= last < first + MAX_PROFILED_STEPS:
            self._answer(name, f"1 to {MAX_PROFILED_STEPS} steps can be profiled at once, got {last - first + 1}")
        else:
            self._session = _Session(name, first, last)
            self._remove_others(name)
            log.info("profiling steps %d to %d", first, last)
            if session is not None and session.name != name:
                self._answer(session.name, "another request came before these steps")

    def _fail(self, session: _Session, error: str) -> None:
        self._session = None
        if session.profiler is not None:
            with suppress(RuntimeError):
                session.profiler.stop_trace()
        self._answer(session.name, error)

    def _write(self, session: _Session) -> None:
        path = self._path(session.name)
        hidden = path.with_name(f"part-{path.name}")  # ends with .gz, so that torch compresses it
        try:
            session.profiler.export_chrome_trace(str(hidden))
            hidden.replace(path)
        except (OSError, RuntimeError, ValueError) as error:
            self._answer(session.name, f"the trace cannot be written: {error}")

    def _answer(self, name: str, error: str) -> None:
        log.warning("profile %s was not taken: %s", name, error)
        path = self._path(name)
        hidden = path.with_name(f"part-{path.name}")
        try:
            hidden.write_bytes(gzip.compress(json.dumps({"meshwright": self._metadata(error=error)}).encode()))
            hidden.replace(path)
        except OSError as failed:
            log.warning("profile %s cannot be answered: %s", name, failed)

    def _metadata(self, **more: Any) -> dict[str, Any]:
        return {"rank": self._rank, "synchronous": self._synchronous, **more}

    def _remove_others(self, name: str) -> None:
        """Delete traces that nobody fetched."""
        for path in self._directory.glob(f"*-rank-{self._rank}.json.gz"):
            if not path.name.startswith(f"{name}-"):
                path.unlink(missing_ok=True)

    def _path(self, name: str) -> Path:
        return self._directory / f"{name}-rank-{self._rank}.json.gz"
