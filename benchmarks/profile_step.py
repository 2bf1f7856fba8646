"""Where the time of a training step goes, by kernels of torch's profiler.

    python -m benchmarks.profile_step --model llama-3.2-1b [--fp8] [--json FILE]

Prints the kernels that take longest, the share of each kind, and how long the device did nothing before which of them.
On a CPU it counts operators, and shows that it runs. `benchmarks.throughput` has profiles of some of its runs, too.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict, replace
from pathlib import Path

import torch

from benchmarks._circumstances import circumstances
from benchmarks._contests import run_of
from benchmarks._gpu_settings import ENTRIES
from benchmarks._gpu_throughput import MODELS, WARM_UP, device_gibibytes, stepper
from benchmarks._ranks import RankError, on_ranks
from benchmarks._report import write_json
from benchmarks._step_profile import Profile, profiled, show
from meshwright_worker.distributed.mesh import join_mesh
from meshwright_worker.rank.task import RankTask


def profile_steps(task: RankTask) -> Profile:
    """Profile some steps of a rank, after those that warm up."""
    with join_mesh(task) as mesh:
        step = stepper(task.run, mesh, plain=False)
        for number in range(1, WARM_UP + 1):
            step(number)
        return profiled(step, WARM_UP + 1, mesh.device)


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
    show(args.model, found)
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
        result: Profile = found
        return result
    raise RankError(f"no setting of {name} is for a GPU with this little memory")


if __name__ == "__main__":
    main()
