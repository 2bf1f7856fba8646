"""Which checkpoint of a job to use, and how much memory its model needs. Pure."""

from __future__ import annotations

from meshwright.api.precision import Precision
from meshwright.checkpoint_places import checkpoint_places
from meshwright.models.architecture import Architecture
from meshwright.models.presets import UnknownModelError, resolve
from meshwright_cli.client.errors import NotFoundError, RejectedError
from meshwright_cli.client.objects import Job

GIB = 1 << 30
_PROCESS = 1.5 * GIB
"""Memory of Python with torch, before any weight."""


def checkpoint_path(job: Job, step: int | None = None) -> str:
    """The path in worker pods of a job's checkpoints, or of the checkpoint of one step.

    Without a step it is the directory of all: the program in the pod takes the newest that is complete and intact.

    Raises:
        RejectedError: the job's spec has no checkpoints that Meshwright can read.
        NotFoundError: none is complete yet. The message says how to wait for one.
    """
    spec = job.spec
    if spec.checkpoint is None:
        raise RejectedError(f"{job.name} saves no checkpoints: it has no `spec.checkpoint`")
    if spec.model is None or spec.runtime.command is not None:
        raise RejectedError(
            f"{job.name} runs its own command (`spec.runtime.command`), and only that can read its checkpoints. They "
            f"are on {spec.checkpoint.place}"
        )
    saved = job.status.checkpoint
    if saved is None:
        first, every = spec.checkpoint.interval, spec.checkpoint.every
        now = f"{job.state}, step {job.status.step or 0:,}"
        if every is not None:
            how = f"saves by time (`checkpoint.every: {every}`). To have one: meshwright checkpoint now {job.name}"
        else:
            how = f"saves one every {first:,} steps. To wait: meshwright wait {job.name} --for step={first}"
        raise NotFoundError(f"{job.name} has no complete checkpoint yet. It is {now}, and {how}")
    root, _, _ = saved.path.rpartition("/")
    if step is None:
        return root
    if "://" in root:
        raise RejectedError(f"{job.name} has its checkpoints in {root}: only the newest can be used, without a step")
    return f"{root}/step-{step:08d}"


def places_of(job: Job) -> list[str]:
    """Where a job's checkpoints are, as its worker pods see it.

    Raises:
        RejectedError: the job's spec has no checkpoints that Meshwright can read.
    """
    checkpoint = job.spec.checkpoint
    if checkpoint is None:
        raise RejectedError(f"{job.name} saves no checkpoints: it has no `spec.checkpoint`")
    if job.spec.runtime.command is not None:
        raise RejectedError(
            f"{job.name} runs its own command (`spec.runtime.command`), and only that can read its checkpoints. They "
            f"are on {checkpoint.place}"
        )
    return checkpoint_places(checkpoint, job.name, job.uid)


def generation_memory(job: Job, precision: str, gpus: int) -> float | None:
    """Bytes of memory for generating text on the CPU. With GPUs, each rank's weights pass through memory.

    None if the model is not known here: the pod then requests no memory.
    """
    model = _architecture(job)
    if model is None:
        return None
    weights = model.parameters * Precision(precision).bytes
    return _PROCESS * max(1, gpus) + 1.25 * weights + _largest(model)


def export_memory(job: Job, dtype: str, file_gib: float) -> float | None:
    """Bytes of memory for an export: one file of weights, and copies of one tensor."""
    model = _architecture(job)
    if model is None:
        return None
    file = min(file_gib * GIB, model.parameters * Precision(dtype).bytes)
    return _PROCESS + file + 3 * _largest(model)


def _architecture(job: Job) -> Architecture | None:
    try:
        return resolve(job.spec.model) if job.spec.model is not None else None
    except (UnknownModelError, ValueError):  # a preset or a field of a newer version
        return None


def _largest(model: Architecture) -> float:
    """Bytes of about the largest tensor in fp32: the embedding, or the experts of a layer."""
    table = model.vocab_size * model.hidden_size
    return 4.0 * max(table, model.parameters / max(1, model.layers) if model.mixture is not None else 0)
