"""The checkpoints that a user's command reports: each is verified before it counts, and old ones are deleted.

Paths that are not absolute are below the checkpoints' directory. Only what is below it is ever deleted. A file of that
directory lists the checkpoints, because the pod that reports the next one may be another. The newest one that the
operator knows stays, however many are retained: the next start names it, and it cannot name one that it does not know.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import posixpath
import shutil
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from meshwright.api import labels
from meshwright_worker.evidence.tail_buffer import TailBuffer

log = logging.getLogger(__name__)

LIST_NAME = ".meshwright-checkpoints.json"
MAX_LISTED = 1000
VERIFY_SECONDS = 3600.0
"""Longest time that a verification may take: while it runs, no other checkpoint counts."""
CHUNK = 65536
LAST_CHARACTERS = 500
"""Characters of the output of a verification that are logged if it fails."""


def place_of(directory: str | None, path: str) -> str:
    """Where a reported checkpoint is: a path that is neither absolute nor a URI is below the checkpoints' directory."""
    return path if directory is None or "://" in path else posixpath.join(directory, path)


@dataclass(slots=True)
class SavedCheckpoints:
    """What to do with the checkpoints of one job."""

    directory: Path | None
    verify: Sequence[str] | None
    """Command that exits with 0 if a checkpoint is complete. None: every one counts."""
    keep: int | None
    """Number of checkpoints to retain. None: all."""
    environment: Mapping[str, str]
    _known: str | None = field(init=False)
    """Where the newest one is that the operator knows."""
    _listing: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)

    def __post_init__(self) -> None:
        self._known = self.environment.get(labels.ENV_RESUME_PATH)

    async def accept(self, step: int, path: str) -> bool:
        """Whether a checkpoint counts. If it does, the oldest ones may be deleted."""
        place = self._place_of(path)
        if self.verify is not None and not await self._is_valid(step, place):
            return False
        await self._retain_newest((step, place))
        return True

    async def delivered(self, path: str) -> None:
        """The operator knows this checkpoint. The one that it knew before may be deleted."""
        place = self._place_of(path)
        if place != self._known:
            self._known = place
            await self._retain_newest()

    def _place_of(self, path: str) -> str:
        return place_of(str(self.directory) if self.directory is not None else None, path)

    async def _retain_newest(self, *newest: tuple[int, str]) -> None:
        if self.keep is None or self.directory is None:
            return
        try:
            async with self._listing:
                await asyncio.to_thread(self._retain, self.directory, newest, self.keep)
        except OSError as error:
            log.warning("old checkpoints cannot be deleted: %s", error)

    async def _is_valid(self, step: int, place: str) -> bool:
        assert self.verify is not None
        variables = {labels.ENV_CHECKPOINT_PATH: place, labels.ENV_CHECKPOINT_STEP: str(step)}
        try:
            process = await asyncio.create_subprocess_exec(
                *self.verify,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                env={**self.environment, **variables},
                start_new_session=True,
            )
        except OSError as error:
            log.warning("`checkpoint.verify` cannot run, so step %d does not count: %s", step, error)
            return False
        try:
            async with asyncio.timeout(VERIFY_SECONDS):
                text = await _last_characters(process)
        except TimeoutError:
            _kill_group(process.pid)
            log.warning("`checkpoint.verify` took over %.0f s, so step %d does not count", VERIFY_SECONDS, step)
            return False
        except asyncio.CancelledError:
            _kill_group(process.pid)
            raise
        if process.returncode:
            log.warning(
                "the checkpoint of step %d at %s is not valid (code %d): %s", step, place, process.returncode, text
            )
        return process.returncode == 0

    def _retain(self, directory: Path, newest: Sequence[tuple[int, str]], keep: int) -> None:
        """List the newest checkpoint, if there is a new one, and delete those that are too many."""
        places = {place for _, place in newest}
        listed = [*(entry for entry in _read(directory / LIST_NAME) if entry[1] not in places), *newest]
        kept = [*(entry for entry in listed[:-keep] if entry[1] == self._known), *listed[-keep:]]
        for _, old in (entry for entry in listed if entry not in kept):
            # One that contains a newer one is deleted with that.
            if not any(Path(newer).is_relative_to(old) for _, newer in kept):
                _delete(directory, Path(old))
        temporary = directory / f"{LIST_NAME}.new"
        temporary.write_text(json.dumps(kept[-MAX_LISTED:]))
        os.replace(temporary, directory / LIST_NAME)


async def _last_characters(process: asyncio.subprocess.Process) -> str:
    """The end of what a process writes until it exits. It may write more than this pod has memory."""
    assert process.stdout is not None
    output = TailBuffer(4 * LAST_CHARACTERS)
    while chunk := await process.stdout.read(CHUNK):
        output.feed(chunk)
    await process.wait()
    return output.text().strip()[-LAST_CHARACTERS:]


def _kill_group(leader: int) -> None:
    """Kill a command and what it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


def _read(path: Path) -> list[tuple[int, str]]:
    """The checkpoints that are listed; none if the list is missing or damaged."""
    try:
        return [(int(step), str(place)) for step, place in json.loads(path.read_text())]
    except (OSError, ValueError, TypeError, RecursionError):
        return []


def _delete(directory: Path, path: Path) -> None:
    inside, real = os.path.realpath(directory), os.path.realpath(path)
    if real == inside or not Path(real).is_relative_to(inside):
        log.warning("the checkpoint %s is not below %s, so it is not deleted", path, directory)
        return
    try:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    except OSError as error:
        log.warning("the checkpoint %s cannot be deleted: %s", path, error)
