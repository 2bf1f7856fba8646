"""Tokens a second of Llama shapes on one GPU: the worker's step and a bare, compiled loop, one after the other.

MFU is 6·N + 12·L·d·s FLOPs a token (PaLM, arXiv 2204.02311, appendix B; N without the embedding's look-up) over the
GPU's dense bf16 peak, also for fp8; HFU adds what activation checkpointing computes again. Memory is the most that
torch's allocator held at a time in the measured steps.
"""

from __future__ import annotations

import gc
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch

from benchmarks._contests import OurLoop, random_tokens, run_of
from benchmarks._entry_process import EntryProcess
from benchmarks._gpu_settings import ENTRIES, GOALS, Entry, Setting, goal_on
from benchmarks._plain_llama import PlainLlama
from benchmarks._plain_loops import Loop, PlainLoop, plain_loop
from benchmarks._report import table
from benchmarks._step_profile import Profile, profiled, show
from meshwright.models.architecture import Architecture
from meshwright.models.presets import PRESETS
from meshwright.protocol.run_config import NativeRun
from meshwright_worker.distributed.mesh import Mesh, join_mesh
from meshwright_worker.rank.task import RankTask
from meshwright_worker.trainer.step_reports import step_flops
from tests.distributed.rank_pool import free_port, tasks_of

MODELS: dict[str, Architecture] = {name: PRESETS[name] for name in GOALS}
FEWEST_STEPS = 5
ENTRY_LIMIT = 600.0
"""Seconds for an entry: compiling an 8B model takes up to a minute on a slow machine, and hanging must not take all."""
WARM_UP = 3
"""Steps before the measured ones: compilation, the allocator's blocks, kernels that are chosen by trying."""


@dataclass(frozen=True)
class Steps:
    """What a run came to."""

    seconds: list[float]
    losses: list[float]
    memory: int | None
    """Bytes; None on CPU."""
    mfu: float | None
    """None where the GPU's peak is not known."""
    hfu: float | None
    device: str = ""
    """Name of the GPU."""
    recomputed: float = 1.0
    """Operations of a step, over those without activation checkpointing."""
    profile: Profile | None = None


_TOO_SMALL = "needs a GPU of"

Outcome = tuple[Setting | None, Steps | None, str]
"""What an entry came to: its setting and steps, or what went wrong."""


def train_for(task: RankTask, steps: int, plain: bool, profiles: bool = False) -> Steps | None:
    """Time `steps` steps after those that warm up; None when the device's memory is not enough. `profiles`: profile
    some steps after them.
    """
    model, training = task.run.architecture, task.run.training
    with join_mesh(task) as mesh:
        try:
            step = stepper(task.run, mesh, plain=plain)
            for number in range(1, WARM_UP + 1):
                step(number)
            if mesh.device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            seconds, losses = [], []
            began = time.perf_counter()
            for number in range(WARM_UP + 1, WARM_UP + steps + 1):
                # Waits for the device to have this step's loss, as training does, and for nothing after it.
                losses.append(step(number))
                ended = time.perf_counter()
                seconds.append(ended - began)
                began = ended
            memory = torch.cuda.max_memory_allocated() if mesh.device.type == "cuda" else None
            found = profiled(step, WARM_UP + steps + 1, mesh.device) if profiles else None
        except torch.OutOfMemoryError:
            return None
        work, typical = step_flops(model, training, 1, mesh.device), median(seconds)
        mfu = work.model / typical / work.peak if work.peak else None
        hfu = work.hardware / typical / work.peak if work.peak else None
        name = torch.cuda.get_device_name(mesh.device) if mesh.device.type == "cuda" else ""
        return Steps(seconds, losses, memory, mfu, hfu, name, work.hardware / work.model, found)


def stepper(run: NativeRun, mesh: Mesh, *, plain: bool) -> Callable[[int], float]:
    """Take the step of this number and return its loss. Batches are made before: in training, a thread makes them."""
    texts = [random_tokens(run.architecture, run.training, seed) for seed in range(2)]
    if plain:
        bare = _bare(run, mesh.device)
        return lambda number: bare.step(number, texts[number % 2])
    ours = OurLoop(run, mesh, draw=False)
    fill((shard.local for shard in ours.trainer.shards), run)
    batches = [ours.batch(text) for text in texts]
    return lambda number: ours.trainer.step(number, batches[number % 2]).loss


def _bare(run: NativeRun, device: torch.device) -> Loop:
    loop = plain_loop(run, 0, device, draw=False)
    if not isinstance(loop, PlainLoop):
        raise TypeError("a bare loop on a GPU is one process")
    fill((parameter.data for parameter in loop.module.parameters()), run)
    if run.training.compile:
        _compile(loop.module)
    return loop


@torch.no_grad()
def fill(parameters: Iterable[torch.Tensor], run: NativeRun) -> None:
    """Draw weights on the device: those that training begins with are drawn on the CPU, a minute for 8B."""
    deviation = (2 / 5 / run.architecture.hidden_size) ** 0.5
    torch.manual_seed(run.training.seed)
    for parameter in parameters:
        parameter.normal_(0, deviation) if parameter.ndim > 1 else parameter.fill_(1)


def _compile(module: PlainLlama) -> None:
    for block in module.layers.values():
        block.forward = torch.compile(block.forward)


def measure_models(
    models: Sequence[str],
    steps: int,
    *,
    quick: bool,
    runs: Sequence[str] = (),
    save: Callable[[dict[str, Any]], None] = lambda _: None,
) -> dict[str, Any]:
    """Every entry of the models: prints the table, gives the numbers. `quick` runs two layers of each model.

    `runs` are labels, of all entries if there are none. `save` gets the numbers after each entry: machines with GPUs
    are lent for a time.
    """
    numbers: dict[str, Any] = {}
    rows = []
    bare: dict[str, float] = {}
    process = EntryProcess(first_that_fits, ENTRY_LIMIT)
    try:
        for entry in ENTRIES:
            if entry.model not in models or (runs and entry.label not in runs):
                continue
            setting, taken, problem = process.outcome(entry, 2 if quick else max(steps, FEWEST_STEPS), quick=quick)
            if setting is None or taken is None:
                print(f"{entry.model} {entry.label}: {problem}", flush=True)
                rows.append([entry.model, entry.label, problem, *[""] * 6])
                numbers[f"{entry.model} {entry.label}"] = {"problem": problem}
                save(numbers)
                continue
            tokens = setting.training()["globalBatchSize"] * setting.training()["sequenceLength"]  # type: ignore[operator]
            rate = tokens / median(taken.seconds)
            if entry.plain:
                bare[entry.model] = rate
            goal = goal_on(taken.device, entry.model, taken.recomputed) or GOALS[entry.model]
            rows.append(_row(entry, setting, taken, rate, goal, bare.get(entry.model)))
            numbers[f"{entry.model} {entry.label}"] = _numbers(setting, taken, rate, goal, bare.get(entry.model))
            print(f"{entry.model} {entry.label}: {rate:,.0f} tokens a second", flush=True)
            save(numbers)
            if taken.profile is not None:
                show(f"{entry.model} {entry.label}", taken.profile)
                # What a profiler leaves in its process must not slow the next entry.
                process.close()
    finally:
        process.close()
    columns = ["model", "run", "tokens/s", "of the goal", "of the bare loop", "MFU", "HFU", "peak GiB", "setting"]
    table("One GPU, 4,096 tokens a sequence", columns, rows)
    return numbers


def failed(numbers: Mapping[str, Any]) -> list[str]:
    """The entries that should have run on this GPU and did not."""
    problems = {name: run.get("problem", "") for name, run in numbers.items()}
    return [name for name, problem in problems.items() if problem and not problem.startswith(_TOO_SMALL)]


def _numbers(setting: Setting, taken: Steps, rate: float, goal: float, bare: float | None) -> dict[str, Any]:
    return {
        "tokens a second": rate,
        "seconds": taken.seconds,
        "MFU": taken.mfu,
        "HFU": taken.hfu,
        "peak memory": taken.memory,
        "losses": taken.losses,
        "setting": setting.numbers(),
        "goal in bf16": goal,
        "ratio to the bare loop": rate / bare if bare else None,
        "profile": asdict(taken.profile) if taken.profile else None,
    }


def first_that_fits(entry: Entry, steps: int, quick: bool) -> Outcome:
    """Run the first setting of an entry that fits into this device's memory."""
    settings = entry.settings_for(device_gibibytes())
    problem = "out of memory" if settings else f"{_TOO_SMALL} {min(one.gpu_memory for one in entry.settings)} GiB"
    for setting in settings:
        model = MODELS[entry.model]
        run = run_of(
            model.model_copy(update={"layers": 2}) if quick else model,
            setting.training(),
            micro_batches=setting.micro_batches,
        )
        (task,) = tasks_of(run, port=free_port())
        try:
            taken = train_for(task, steps, entry.plain, entry.profiled)
        except Exception as error:
            # One setting that this version of torch cannot run must not cost the others' numbers.
            return None, None, traceback.format_exception_only(error)[-1].strip().splitlines()[-1]
        finally:
            _release()
        if taken is not None:
            return setting, taken, ""
    return None, None, problem


def _release() -> None:
    """Give back what a run left on the device: the next one may need all of it."""
    gc.collect()
    torch._dynamo.reset()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def device_gibibytes() -> float | None:
    """Memory of the GPU; None on a CPU."""
    if not torch.cuda.is_available():
        return None
    return float(torch.cuda.get_device_properties(0).total_memory / 2**30)


def _row(entry: Entry, setting: Setting, taken: Steps, rate: float, goal: float, bare: float | None) -> list[str]:
    how = [
        f"{setting.rows} x {setting.micro_batches} rows",
        f"checkpointing {setting.checkpointing}" if setting.checkpointing != "None" else "",
        "" if setting.master_weights else "no master weights",
        f"loss in {setting.loss_chunk}" if setting.loss_chunk else "",
        "compiled" if setting.compile else "",
        "deterministic" if setting.deterministic else "",
        "early updates" if setting.early else "",
    ]
    return [
        entry.model,
        entry.label,
        f"{rate:,.0f}",
        "" if setting.fp8 else f"{rate / goal:.0%}",
        f"{rate / bare:.2f}" if bare else "",
        f"{taken.mfu:.1%}" if taken.mfu else "",
        f"{taken.hfu:.1%}" if taken.hfu else "",
        f"{taken.memory / 2**30:.1f}" if taken.memory else "",
        ", ".join(part for part in how if part),
    ]
