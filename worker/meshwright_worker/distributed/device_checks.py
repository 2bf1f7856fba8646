"""Checks what a device supports, from its properties, before any process group is created.

A CPU computes every format correctly but slowly, which is acceptable for tests. A GPU must support the format in
hardware: a format that it would only emulate, or lacks, is rejected, and the message names the nearest supported
format. `training.compile` needs a compiler, which the device determines.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping

from meshwright.api.precision import Precision
from meshwright.api.training import TrainingSpec
from meshwright.figures import counted
from meshwright_worker.distributed.device import DeviceProperties
from meshwright_worker.rank.failures import InvalidRunError

_NEEDS = {Precision.BF16: (8, 0), Precision.FP16: (5, 3)}
"""Compute capability of the first GPUs that multiply in a format (CUDA C++ Programming Guide, arithmetic instructions);
all of them have fp32 and fp64.
"""
_FP8_NEEDS = (8, 9)
_NEAREST = {
    Precision.BF16: (Precision.FP16, Precision.FP32),
    Precision.FP16: (Precision.FP32,),
    Precision.FP32: (),
    Precision.FP64: (),
}


class DeviceMissingError(RuntimeError):
    """The pod has fewer GPUs than ranks. A restart, perhaps on another node, may fix it."""


def validate_device(properties: DeviceProperties, ranks: int, training: TrainingSpec) -> None:
    """Reject a run that this rank's device cannot execute; `ranks` is the number of ranks in its pod.

    Raises:
        DeviceMissingError: there are more ranks than GPUs.
        InvalidRunError: the device does not support the run; lists every problem.
    """
    if properties.capability is not None and ranks > properties.count:
        raise DeviceMissingError(
            f"`workers.gpusPerWorker: {ranks}`: the pod sees {counted(properties.count, 'GPU')}; "
            f"nearest: {properties.count}"
        )
    problems = [*device_problems(properties, training.precision, fp8=training.fp8 is not None)]
    if training.compile:
        problems += compiler_problems(properties, os.environ)
    if problems:
        raise InvalidRunError("; ".join(problems))


def device_problems(properties: DeviceProperties, precision: Precision, *, fp8: bool) -> Iterator[str]:
    """Return what the device does not support: each field and the nearest value that works. Pure."""
    if properties.capability is None:
        return
    needed = _NEEDS.get(precision, (0, 0))
    if properties.capability < needed:
        fits = [other.value for other in _NEAREST[precision] if properties.capability >= _NEEDS.get(other, (0, 0))]
        yield (
            f"`training.precision: {precision.value}` needs a GPU of compute capability {_text(needed)}, and "
            f"{properties.name} has {_text(properties.capability)}; nearest: {', '.join(fits)}"
        )
    if fp8 and properties.capability < _FP8_NEEDS:
        best = Precision.BF16 if properties.capability >= _NEEDS[Precision.BF16] else Precision.FP32
        yield (
            f"`training.fp8` needs a GPU of compute capability {_text(_FP8_NEEDS)}, and {properties.name} has "
            f"{_text(properties.capability)}, which would only emulate it; nearest: leave it out, with "
            f"`training.precision: {best.value}`"
        )


def compiler_problems(
    properties: DeviceProperties, environment: Mapping[str, str], find: Callable[[str], str | None] = shutil.which
) -> Iterator[str]:
    """Return why torch.compile would fail at its first kernel: it makes C++ for CPUs, and for GPUs launchers of Triton
    kernels, which are in C.
    """
    if properties.capability is None:
        names: tuple[str, ...] = (environment.get("CXX") or "g++",)
        language = "C++"
    else:
        names = (environment["CC"],) if environment.get("CC") else ("gcc", "clang")
        language = "C"
    if not any(find(name.split()[0]) for name in names):
        yield (
            f"`training.compile` needs a {language} compiler on a {'CPU' if properties.capability is None else 'GPU'}, "
            f"and `workers.image` has no {' or '.join(names)}: add one to the image, or leave `training.compile` out"
        )


def _text(capability: tuple[int, int]) -> str:
    return ".".join(str(number) for number in capability)
