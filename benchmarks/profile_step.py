"""Where the time of a training step goes, by kernels of torch's profiler.

    python -m benchmarks.profile_step --model llama-3.2-1b [--fp8] [--json FILE]

Prints the kernels that take longest, the share of each kind, and how long the device did nothing before which of them.
On a CPU it counts operators, and shows that it runs.
"""

from __future__ import annotations

import argparse
import math
import re
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks._circumstances import circumstances
from benchmarks._contests import OurLoop, random_tokens, run_of
from benchmarks._gpu_settings import ENTRIES
from benchmarks._gpu_throughput import MODELS, device_gibibytes, fill
from benchmarks._ranks import RankError, on_ranks
from benchmarks._report import table, write_json
from meshwright_worker.distributed.mesh import join_mesh
from meshwright_worker.rank.task import RankTask

WARM_UP, STEPS = 3, 2
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


def profile_steps(task: RankTask) -> Profile:
    """Profile some steps of a rank, after those that warm up."""
    with join_mesh(task) as mesh:
        loop = OurLoop(task.run, mesh, draw=False)
        fill((shard.local for shard in loop.trainer.shards), task.run)
        batch = loop.batch(random_tokens(task.run.architecture, task.run.training, 0))
        for number in range(1, WARM_UP + 1):
            loop.trainer.step(number, batch)
        cuda = mesh.device.type == "cuda"
        with profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]) as profiler:
            began = time.perf_counter()
            for number in range(WARM_UP + 1, WARM_UP + STEPS + 1):
                loop.trainer.step(number, batch)
            if cuda:
                torch.cuda.synchronize()
            seconds = (time.perf_counter() - began) / STEPS
        found = [
            Kernel(event.key, event.count, (event.self_device_time_total if cuda else event.self_cpu_time_total) / 1e6)
            for event in profiler.key_averages()
        ]
        spans = [
            (event.name, event.time_range.start / 1e6, event.time_range.end / 1e6)
            for event in profiler.events()
            if (event.device_type is DeviceType.CUDA) is cuda
        ]
        return summarize(found, seconds, STEPS, idle_times(spans))


def main() -> None:
    """Print the profile, and write it if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=tuple(MODELS), default="llama-3.2-1b")
    parser.add_argument("--fp8", action="store_true", help="the products in fp8")
    parser.add_argument("--early", action="store_true", help="the update launched before the host has read the loss")
    parser.add_argument("--quick", action="store_true", help="a tiny model on any device: whether it runs")
    parser.add_argument("--json", type=Path, help="file for the same numbers")
    args = parser.parse_args()
    found = profile_model(args.model, fp8=args.fp8, early=args.early, quick=args.quick)
    shares = [[kind, f"{share:.1%}"] for kind, share in found.kinds.items()]
    table(f"{args.model}: a step takes {found.step_seconds * 1e3:.1f} ms", ["kind", "share"], shares)
    rows = [[kernel.name[:100], str(kernel.calls), f"{kernel.seconds * 1e3:.2f}"] for kernel in found.kernels]
    table(f"Kernels of {STEPS} steps", ["kernel", "calls", "ms"], rows)
    rows = [[idle.before[:100], str(idle.times), f"{idle.seconds * 1e3:.2f}"] for idle in found.idle[:MOST_IDLE]]
    table(f"The device does nothing in {STEPS} steps", ["before the kernel", "times", "ms"], rows)
    idle = max(0.0, 1 - found.busy_seconds / found.step_seconds)
    print(
        f"kernels take {found.busy_seconds * 1e3:.1f} ms of a step; at least {idle:.1%} of it the device does nothing"
    )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    write_json(args.json, {"circumstances": circumstances(device), "results": asdict(found)})


def profile_model(name: str, *, fp8: bool, early: bool, quick: bool) -> Profile:
    """Profile the first setting of a model that the device's memory allows.

    Raises:
        RankError: the steps failed, or no setting fits.
    """
    label = "fp8" if fp8 else "bf16"
    entry = next(
        entry for entry in ENTRIES if entry.model == name and entry.label.startswith(label) and not entry.plain
    )
    settings = entry.settings_for(device_gibibytes())
    for number, setting in enumerate(settings, 1):
        model = MODELS[name]
        training = replace(setting, early=early).training()
        if quick:
            small = {"layers": 1, "hidden_size": 64, "intermediate_size": 96, "heads": 4, "kv_heads": 2}
            model = model.model_copy(update={**small, "head_size": 16, "value_size": 16, "vocab_size": 512})
            training |= {"sequenceLength": 64, "compile": False, "lossChunkTokens": None}
        try:
            (found,) = on_ranks(profile_steps, run_of(model, training, micro_batches=setting.micro_batches))
        except RankError as error:
            if "OutOfMemoryError" not in str(error) or number == len(settings):
                raise
            continue
        profiled: Profile = found
        return profiled
    raise RankError(f"no setting of {name} is for a GPU with this little memory")


if __name__ == "__main__":
    main()
