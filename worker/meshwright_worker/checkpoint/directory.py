"""The directory of a job's checkpoints: what is complete has a plain name, what is not has a hidden one.

A checkpoint is written under a hidden name and renamed when every byte of it is on the disk. A crash at any moment
leaves complete checkpoints and hidden directories that nobody reads, which the next start removes: but one that was
hidden to make place for its replacement comes back if that did not come.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from meshwright_worker.checkpoint.errors import CheckpointError
from meshwright_worker.checkpoint.manifest import MANIFEST, BaseManifest

_COMPLETE = re.compile(r"step-(\d{8,})")
_TEMPORARY, _DAMAGED, _REPLACED, _RETIRED = ".writing-", ".damaged-", ".replaced-", ".retired-"


class CheckpointDirectory:
    """Names, commits and removes checkpoints under one root. Only rank 0 changes anything, except inside `temporary`.

    The hidden name carries the mesh generation: a straggler of an older one cannot write into a newer one's checkpoint.
    """

    def __init__(self, root: Path, generation: int = 0) -> None:
        self.root = root
        self._generation = generation

    def path(self, step: int) -> Path:
        """Where the complete checkpoint of a step is."""
        return self.root / f"step-{step:08d}"

    def temporary(self, step: int) -> Path:
        """Where the checkpoint of a step is while it is written."""
        return self.root / f"{_TEMPORARY}{self._generation}-{self.path(step).name}"

    def steps(self) -> list[int]:
        """The steps of complete checkpoints, newest first."""
        if not self.root.is_dir():
            return []
        found = ((entry, _COMPLETE.fullmatch(entry.name)) for entry in self.root.iterdir())
        return sorted((int(name[1]) for entry, name in found if name and (entry / MANIFEST).is_file()), reverse=True)

    def prepare(self, step: int) -> Path:
        """An empty hidden directory for a checkpoint that is about to be written.

        Raises:
            CheckpointError: there are checkpoints of later steps: this one would be the first that `retain` removes.
        """
        newer_steps = [found for found in self.steps() if found > step]
        if newer_steps:
            raise CheckpointError(
                f"{self.root} has checkpoints of later steps than {step}, up to {newer_steps[0]}: load the newest "
                "before "
                "training, or save to an empty directory"
            )
        path = self.temporary(step)
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(parents=True)
        return path

    def commit(self, manifest: BaseManifest) -> Path:
        """Make the checkpoint that was written under its hidden name a complete one: the manifest, then the rename."""
        step = manifest.state.step
        hidden, final = self.temporary(step), self.path(step)
        write_durably(hidden / MANIFEST, manifest.model_dump_json(by_alias=True, indent=1).encode())
        _sync_directory(hidden)
        if final.exists():
            self._hide(final, _REPLACED)
        hidden.rename(final)
        _sync_directory(self.root)
        return final

    def retain(self, keep: int) -> None:
        """Remove all complete checkpoints but the newest `keep`, and what was replaced or found damaged.

        Call after a commit: until there is a newer checkpoint, people may want to see what became of a damaged one.
        """
        for step in self.steps()[keep:]:
            self._hide(self.path(step), _RETIRED)
        self._remove_hidden(_RETIRED, _REPLACED, _DAMAGED)

    def clean(self) -> None:
        """Remove what earlier processes left unfinished, retired or replaced. Call before any save.

        A checkpoint whose replacement did not get its name comes back.
        """
        for hidden in self.root.glob(f"{_REPLACED}*"):
            plain = hidden.with_name(hidden.name.removeprefix(_REPLACED))
            if (hidden / MANIFEST).is_file() and not plain.exists():
                hidden.rename(plain)
        self._remove_hidden(_TEMPORARY, _RETIRED, _REPLACED)

    def quarantine(self, step: int) -> None:
        """Take a damaged checkpoint out of sight. It stays on the disk until the next one is complete."""
        if self.path(step).exists():
            self._hide(self.path(step), _DAMAGED)

    def _hide(self, path: Path, prefix: str) -> None:
        # Renamed before it is removed: a half-removed directory under a plain name would look like a checkpoint.
        hidden = path.with_name(prefix + path.name)
        shutil.rmtree(hidden, ignore_errors=True)
        path.rename(hidden)

    def _remove_hidden(self, *prefixes: str) -> None:
        if not self.root.is_dir():
            return
        for entry in self.root.iterdir():
            if entry.name.startswith(prefixes):
                shutil.rmtree(entry, ignore_errors=True)


def write_durably(path: Path, content: bytes) -> None:
    """Write a new file and flush it to the disk."""
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
