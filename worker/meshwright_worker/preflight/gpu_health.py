"""The health of the pod's GPUs, as NVML reports it. Without NVML (package `nvidia-ml-py`) nothing is checked."""

from __future__ import annotations

import contextlib
import importlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class GpuState:
    """What NVML says about one GPU."""

    index: int
    name: str = ""
    uncorrected_errors: int = 0
    """Uncorrectable ECC errors since the driver was loaded."""
    remap_pending: bool = False
    """Whether rows of memory wait for a reset to be remapped."""
    remap_failed: bool = False
    """Whether a row could not be remapped: no spare row is left."""
    slowdown: str = ""
    """Why the hardware slows the GPU down: heat, or power. Empty if it does not."""


def read_gpus() -> list[GpuState]:
    """The state of each GPU. Empty without NVML, a driver or GPUs."""
    try:
        nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()
    except Exception as error:  # any error of an optional package or of the driver means: no information
        log.debug("no NVML: %s", error)
        return []
    try:
        return [_state(nvml, index) for index in range(nvml.nvmlDeviceGetCount())]
    except nvml.NVMLError as error:
        log.debug("NVML: %s", error)
        return []
    finally:
        with contextlib.suppress(nvml.NVMLError):
            nvml.nvmlShutdown()


def _state(nvml: Any, index: int) -> GpuState:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)

    def ask(function: str, *arguments: object) -> Any:
        """None if this GPU or driver does not support the question."""
        try:
            return getattr(nvml, function)(handle, *arguments)
        except (nvml.NVMLError, AttributeError):
            return None

    name = ask("nvmlDeviceGetName")
    errors = ask("nvmlDeviceGetTotalEccErrors", nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC)
    rows = ask("nvmlDeviceGetRemappedRows")
    reasons = ask("nvmlDeviceGetCurrentClocksThrottleReasons") or 0
    _, _, pending, failed = rows if rows is not None else (0, 0, 0, 0)
    return GpuState(
        index=index,
        name=name.decode() if isinstance(name, bytes) else str(name or ""),
        uncorrected_errors=int(errors or 0),
        remap_pending=bool(pending),
        remap_failed=bool(failed),
        slowdown=_slowdown(nvml, reasons),
    )


def _slowdown(nvml: Any, reasons: int) -> str:
    for constant, text in (
        ("nvmlClocksThrottleReasonHwThermalSlowdown", "heat"),
        ("nvmlClocksThrottleReasonHwPowerBrakeSlowdown", "the power brake of the server"),
        ("nvmlClocksThrottleReasonHwSlowdown", "its hardware (heat or power)"),
    ):
        if reasons & getattr(nvml, constant, 0):
            return text
    return ""


def problems(gpus: list[GpuState]) -> Iterator[tuple[str, str]]:
    """What is wrong with each GPU, and the fix."""
    for gpu in gpus:
        subject = f"GPU {gpu.index}{f' ({gpu.name})' if gpu.name else ''}"
        if gpu.uncorrected_errors:
            yield (
                f"{subject} has had {gpu.uncorrected_errors} uncorrectable memory errors since its driver was loaded",
                "drain the node and reset the GPU (`nvidia-smi --gpu-reset`); replace it if the errors come back",
            )
        if gpu.remap_failed:
            yield (
                f"{subject} could not remap a damaged row of its memory",
                "cordon the node and replace the GPU",
            )
        elif gpu.remap_pending:
            yield (
                f"{subject} has damaged rows of memory that wait to be remapped",
                "drain the node and reset the GPU (`nvidia-smi --gpu-reset`)",
            )
        if gpu.slowdown:
            yield (
                f"{subject} is slowed down by {gpu.slowdown}",
                "check cooling and power of the node; every other rank waits for this one",
            )
