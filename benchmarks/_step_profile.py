"""Where the time of training steps goes, by kernels of torch's profiler."""

from __future__ import annotations

import math
import re
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks._report import table

PROFILED = 2
"""Steps of a profile."""
MOST, MOST_IDLE = 25, 10
KINDS = (
    ("communication", r"nccl|all_?reduce|all_?gather|reduce_?scatter"),
    ("attention", r"flash|fmha|attention|cudnn.*sdpa"),
    ("pageable copies", r"memcpy.*pageable"),
    ("copies", r"memcpy|memset|(?<!_to_)copy_"),
    ("products", r"gemm|cutlass|cublas|nvjet|::mm|addmm|bmm|matmul|scaled_mm|grouped_mm"),
    ("loss", r"softmax|nll_loss|cross_entropy|logsumexp"),
    ("optimizer", r"adam|multi_tensor|foreach"),
)
"""Kinds of kernels and the names of each, the first that matches."""


@dataclass(frozen=True)
class Kernel:
    """A kernel, over the profiled steps."""

    name: str
    calls: int
    seconds: float


@dataclass(frozen=True)
class Idle:
    """Time in which the device does nothing, over the profiled steps, by the kernel that it waits for."""

    before: str
    times: int
    seconds: float


@dataclass(frozen=True)
class Profile:
    """Of a rank's steps."""

    step_seconds: float
    busy_seconds: float
    """Of a step, the sum over its kernels."""
    kinds: dict[str, float]
    """Share of each kind in the time of all kernels."""
    kernels: list[Kernel]
    """Those that take longest."""
    idle: list[Idle]
    """The longest."""


def kind_of(name: str) -> str:
    """The kind of a kernel."""
    return next((kind for kind, pattern in KINDS if re.search(pattern, name, re.IGNORECASE)), "other")


def idle_times(spans: Iterable[tuple[str, float, float]]) -> list[Idle]:
    """Add up the time between kernels, each of a name, a beginning and an end in seconds. The longest first."""
    times: Counter[str] = Counter()
    seconds: defaultdict[str, float] = defaultdict(float)
    busy_until = math.inf
    for name, began, ended in sorted(spans, key=lambda span: span[1]):
        if began > busy_until:
            times[name] += 1
            seconds[name] += began - busy_until
        busy_until = ended if math.isinf(busy_until) else max(busy_until, ended)
    ordered = sorted(seconds, key=lambda name: -seconds[name])
    return [Idle(name, times[name], seconds[name]) for name in ordered[:MOST]]


def summarize(kernels: Iterable[Kernel], step_seconds: float, steps: int, idle: Sequence[Idle] = ()) -> Profile:
    """Add up kernels of so many steps."""
    ordered = sorted(kernels, key=lambda kernel: -kernel.seconds)
    total = sum(kernel.seconds for kernel in ordered)
    kinds: defaultdict[str, float] = defaultdict(float)
    for kernel in ordered:
        kinds[kind_of(kernel.name)] += kernel.seconds / total if total else 0.0
    shares = dict(sorted(kinds.items(), key=lambda item: -item[1]))
    return Profile(step_seconds, total / steps, shares, ordered[:MOST], list(idle))


def profiled(step: Callable[[int], object], first: int, device: torch.device) -> Profile:
    """Profile the steps from number `first` on. On a CPU operators take the place of kernels."""
    cuda = device.type == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]) as profiler:
        began = time.perf_counter()
        for number in range(first, first + PROFILED):
            step(number)
        if cuda:
            torch.cuda.synchronize()
        seconds = (time.perf_counter() - began) / PROFILED
    found = [
        Kernel(event.key, event.count, (event.self_device_time_total if cuda else event.self_cpu_time_total) / 1e6)
        for event in profiler.key_averages()
    ]
    spans = [
        (event.name, event.time_range.start / 1e6, event.time_range.end / 1e6)
        for event in profiler.events()
        if (event.device_type is DeviceType.CUDA) is cuda
    ]
    return summarize(found, seconds, PROFILED, idle_times(spans))


def show(name: str, found: Profile) -> None:
    """Print a profile's tables."""
    shares = [[kind, f"{share:.1%}"] for kind, share in found.kinds.items()]
    table(f"{name}: a step takes {found.step_seconds * 1e3:.1f} ms", ["kind", "share"], shares)
    rows = [[kernel.name[:100], str(kernel.calls), f"{kernel.seconds * 1e3:.2f}"] for kernel in found.kernels]
    table(f"Kernels of {PROFILED} steps", ["kernel", "calls", "ms"], rows)
    rows = [[idle.before[:100], str(idle.times), f"{idle.seconds * 1e3:.2f}"] for idle in found.idle[:MOST_IDLE]]
    table(f"The device does nothing in {PROFILED} steps", ["before the kernel", "times", "ms"], rows)
    idle = max(0.0, 1 - found.busy_seconds / found.step_seconds)
    print(
        f"kernels take {found.busy_seconds * 1e3:.1f} ms of a step; at least {idle:.1%} of it the device does nothing"
    )
