"""The checkpoint of another run that a run begins from (`checkpoint.resumeFrom`).

It is read once, while the run has no checkpoint of its own. All ranks choose and verify it together, as their own. What
differs is what happens to the files: nothing here writes, renames or removes any, because they belong to another job,
which may still train. So a damaged checkpoint stays as it is, and an unfinished one too.
"""

from __future__ import annotations

import errno
import logging
import os
import re
from collections.abc import Mapping, Sequence

from meshwright.api.checkpoint import CheckpointSpec, StoreSpec
from meshwright.checkpoint_places import ResumeSource, resume_source
from meshwright.figures import counted
from meshwright_worker.checkpoint.collective_errors import on_all_ranks, on_first_rank
from meshwright_worker.checkpoint.files import CheckpointPath, files_of
from meshwright_worker.checkpoint.loader import check_same_run, read_intact, steps_on_mesh
from meshwright_worker.checkpoint.manifest import MANIFEST, Manifest
from meshwright_worker.checkpoint.store import CheckpointStore, object_files, open_store
from meshwright_worker.checkpoint_errors import (
    CheckpointMismatchError,
    CheckpointVolumeError,
    DamagedCheckpointError,
    ForeignCheckpointError,
    ResumeSourceError,
)
from meshwright_worker.distributed.mesh import Mesh
from meshwright_worker.rank.task import WorkProgress

log = logging.getLogger(__name__)

FIELD = "checkpoint.resumeFrom"
_FIX = (
    "name the directory or the URI of a run with a complete checkpoint, as `meshwright checkpoint list` shows it, or "
    "remove the field to begin at step 0"
)
_MAX_NAMED = 8
"""Maximum number of steps or runs in a message."""
_SHORT_STEP = re.compile(r"step-(\d{1,7})")


def checkpoint_of_other_run(
    spec: CheckpointSpec,
    claim: str,
    mesh: Mesh,
    expected: Manifest,
    steps: int,
    progress: WorkProgress | None = None,
) -> tuple[CheckpointPath, Manifest]:
    """Return the checkpoint that `resumeFrom` names, or the newest intact one of the run that it names. Collective.

    Args:
        spec: the job's checkpoints; `resume_from` is set.
        claim: where their claim is mounted.
        mesh: the ranks.
        expected: the manifest of the checkpoints that this run saves.
        steps: the last step of this run.
        progress: counts the bytes that are read.

    Raises:
        ResumeSourceError: there is no such checkpoint, it is damaged, or it leaves no step to train.
        CheckpointMismatchError: it is of another model or another stream of samples.
        ForeignCheckpointError: it is of another kind or version.
        CheckpointVolumeError: a rank cannot read it.
    """
    try:
        path, manifest = _find(spec, resume_source(spec.resume_from or "", claim), mesh, progress)
        check_same_run(manifest, expected, of_other_run=True)
        _check_steps_left(manifest.state.step, steps)
    except (ResumeSourceError, CheckpointMismatchError, ForeignCheckpointError, CheckpointVolumeError) as error:
        raise type(error)(f"`{FIELD}: {spec.resume_from}`: {error}") from error
    return path, manifest


def _find(
    spec: CheckpointSpec, source: ResumeSource, mesh: Mesh, progress: WorkProgress | None
) -> tuple[CheckpointPath, Manifest]:
    options = _options(spec, source.place)
    store = _opened(source.place, options, mesh)
    complete, damages = _complete_steps(store, mesh), list[str]()
    wanted = complete if source.step is None else [step for step in complete if step == source.step]
    for step in wanted:
        path = _located(store, source, step, options, mesh)
        if source.name and not _is_there(path, mesh):
            break
        try:
            return path, read_intact(path, mesh, Manifest, progress)
        except (DamagedCheckpointError, CheckpointVolumeError) as error:
            # Some ranks find a file damaged or missing, others do not: the other run may be removing it.
            if not _is_there(path, mesh):
                fix = "name one that its run retains (`checkpoint.keepEverySteps`)"
                raise CheckpointVolumeError(f"{path} was removed while it was read: {fix}") from error
            if isinstance(error, CheckpointVolumeError):
                raise
            damages.append(str(error))
            if mesh.rank == 0 and source.step is None:
                log.warning("%s; trying the previous checkpoint", error)
    unfinished = on_first_rank(store.unfinished, mesh) or {}
    meant = on_first_rank(lambda: _probably_meant(source), mesh) if not complete else None
    raise ResumeSourceError(_why_none(source, complete, unfinished, damages, meant or ""))


def _probably_meant(source: ResumeSource) -> str:
    """What a name that is no run's may stand for: a step without eight digits, or a job without its uid."""
    before, _, last = source.place.rpartition("/")
    if (step := _SHORT_STEP.fullmatch(last)) is not None:
        return f"the name of a checkpoint has eight digits: name `step-{int(step[1]):08d}`"
    if "://" in source.place:
        return ""
    run = re.compile(re.escape(last) + "-[0-9a-f]{8}")
    try:
        found = sorted(entry.name for entry in os.scandir(before) if run.fullmatch(entry.name))
    except OSError:
        return ""
    more = f" and {len(found) - _MAX_NAMED} more" if len(found) > _MAX_NAMED else ""
    which = "the run" if len(found) == 1 else "one of these runs:"
    return f"name {which} `{'`, `'.join(found[:_MAX_NAMED])}`{more}" if found else ""


def _why_none(
    source: ResumeSource,
    complete: Sequence[int],
    unfinished: Mapping[int, str],
    damages: Sequence[str],
    meant: str = "",
) -> str:
    """Why training cannot begin from the other run, and the fix. Pure."""
    more = f" and {len(complete) - _MAX_NAMED} more" if len(complete) > _MAX_NAMED else ""
    one, listed = len(complete) == 1, ", ".join(map(str, complete[:_MAX_NAMED])) + more
    steps = f"step {listed}" if one else f"steps {listed}"
    if damages and source.step is not None:
        return f"{damages[0]}: name another step, or only the run to begin from its newest intact checkpoint"
    if damages:
        return f"every checkpoint in {source.place} is damaged ({steps}); the newest: {damages[0]}: {_FIX}"
    which = f" {source.name}" if source.name else f" of step {source.step}" if source.step is not None else ""
    state = unfinished.get(source.step, "") if source.step is not None else ", ".join(sorted(set(unfinished.values())))
    text = f"there is no complete checkpoint{which} in {source.place}{f' ({state})' if state else ''}"
    if complete:
        those, them = ("that", "it") if one else ("those", "one of them")
        return f"{text}, which has {those} of {steps}: name {them}, or only the run for the newest one"
    return f"{text}: {meant or _FIX}"


def _check_steps_left(step: int, steps: int) -> None:
    if step >= steps:
        raise ResumeSourceError(
            f"that run has completed {counted(step, 'step')}, and `training.steps`, which includes them, is {steps}: "
            f"set it above {step}, or name an earlier checkpoint"
        )


def _options(spec: CheckpointSpec, place: str) -> StoreSpec | None:
    """How the object store of the other run is used: as that of `uri`, if it is of the same kind."""
    same = spec.uri is None or spec.uri.partition("://")[0] == place.partition("://")[0]
    return spec.store if same else None


def _opened(place: str, options: StoreSpec | None, mesh: Mesh) -> CheckpointStore:
    """Open the store on every rank. If one cannot, no rank waits for it.

    Raises:
        ResumeSourceError: the scheme is unknown, or its package is missing.
    """
    found: list[CheckpointStore] = []
    try:
        on_all_ranks(lambda: found.append(open_store(place, 0, options, FIELD)), mesh)
    except CheckpointVolumeError as error:
        raise ResumeSourceError(str(error)) from error
    return found[0]


def _complete_steps(store: CheckpointStore, mesh: Mesh) -> list[int]:
    """The steps of complete checkpoints, newest first.

    Raises:
        ResumeSourceError: the run's directory is a file, or its bucket does not exist.
    """
    try:
        return steps_on_mesh(store, mesh)
    except CheckpointVolumeError as error:
        if error.errno == (errno.ENXIO if store.is_remote else errno.ENOTDIR):
            raise ResumeSourceError(f"{error}: {_FIX}") from error
        raise


def _located(
    store: CheckpointStore, source: ResumeSource, step: int, options: StoreSpec | None, mesh: Mesh
) -> CheckpointPath:
    """The checkpoint of a step, the same one on every rank: in an object store, a run that still trains may save the
    step again in another mesh generation. Collective.
    """
    if not store.is_remote:
        return store.files(step)
    named = f"{source.place}/{source.name}" if source.name else ""
    return object_files(named or on_first_rank(lambda: str(store.files(step)), mesh) or "", options)


def _is_there(path: CheckpointPath, mesh: Mesh) -> bool:
    """Whether a checkpoint has a manifest still. Collective."""

    def is_there() -> bool:
        try:
            files_of(path).read_range(MANIFEST, 0, 1)
        except FileNotFoundError:
            return False
        return True

    return on_first_rank(is_there, mesh) is True
