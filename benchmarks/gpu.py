"""Everything that only a GPU can show, in one run: tests, throughput and profiles, and one report of them.

    python -m benchmarks.gpu [--quick] [--parity-seconds SECONDS] [--output DIRECTORY]

`make gpu` runs it. Each part has a limit of time, and the report is written anew after each, because machines with GPUs
are lent for a time.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks._circumstances import circumstances

OUTPUT = Path(__file__).parent / "results"
_LAST_LINES = 40
_PROCESSES = max(1, min(8, (os.cpu_count() or 1) // 2))
"""That run tests: importing torch and compiling take more of their time than the GPU."""
_ALLOCATOR = (("PYTORCH_ALLOC_CONF", "expandable_segments:True"),)


@dataclass(frozen=True)
class Part:
    """A command of the run."""

    title: str
    command: tuple[str, ...]
    limit: float
    """Seconds."""
    environment: tuple[tuple[str, str], ...] = ()
    """Variables that it gets in addition."""


@dataclass(frozen=True)
class Ran:
    """What a part came to."""

    title: str
    outcome: str
    seconds: float
    text: str


def parts(output: Path, *, quick: bool, parity_seconds: float) -> list[Part]:
    """The parts in order: what is right first, then how fast it is."""
    small = ("--quick",) if quick else ()
    python, throughput = sys.executable, str(output / "throughput-cuda.json")
    # With `-k`, no page is written. The rows take turns on the GPU, and there are more than a thousand.
    rows = ("-k", "=", "--seconds", f"{parity_seconds:g}", "--json", str(output / "parity-cuda.json"))
    return [
        Part("Tests", (python, "-m", "pytest", "-q", "-n", str(_PROCESSES), "-m", "cuda", "tests/cuda"), 900),
        Part(
            "Parity", (python, "-m", "tests.parity", *rows), parity_seconds + 300, (("MESHWRIGHT_TEST_DEVICE", "cuda"),)
        ),
        Part(
            "Throughput",
            (python, "-m", "benchmarks.throughput", "--device", "cuda", "--json", throughput, *small),
            2400,
            _ALLOCATOR,
        ),
        *(_profile(output, name, (*flags, *small)) for name, flags in (("bf16", ()), ("fp8", ("--fp8",)))),
    ]


def _profile(output: Path, name: str, flags: tuple[str, ...]) -> Part:
    file = str(output / f"profile-{name}.json")
    command = (sys.executable, "-m", "benchmarks.profile_step", "--json", file, *flags)
    return Part(f"Profile of 1B in {name}", command, 600, _ALLOCATOR)


def run_part(part: Part) -> Ran:
    """Run a part; what it printed is kept if it takes too long, too."""
    began = time.monotonic()
    try:
        done = subprocess.run(
            part.command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=part.limit,
            check=False,
            env={**os.environ, **dict(part.environment)},
        )
        text = done.stdout
        outcome = "succeeded" if done.returncode == 0 else f"failed with exit status {done.returncode}"
    except subprocess.TimeoutExpired as error:
        printed = error.stdout or b""
        text = printed.decode(errors="replace") if isinstance(printed, bytes) else printed
        outcome = f"did not end within {part.limit:.0f} s"
    return Ran(part.title, outcome, time.monotonic() - began, text)


def report(known: dict[str, object], ran: Sequence[Ran]) -> str:
    """The report as Markdown."""
    lines = ["# Results on a GPU", "", *(f"- {name}: {value}" for name, value in known.items()), ""]
    for each in ran:
        lines += [f"## {each.title}", "", f"It {each.outcome} after {each.seconds:.0f} s.", "", "```text"]
        lines += each.text.strip().splitlines()[-_LAST_LINES:]
        lines += ["```", ""]
    return "\n".join(lines)


def main() -> None:
    """Run all parts; exit status 1 if one failed, 2 without a GPU."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two layers of each model: whether it runs, not how fast")
    parser.add_argument(
        "--parity-seconds", type=float, default=600, help="start no row of the parity matrix after this time"
    )
    parser.add_argument("--output", type=Path, default=OUTPUT, help="directory of the report")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("there is no GPU that torch can use: run this on a machine with one", file=sys.stderr)
        sys.exit(2)
    args.output.mkdir(parents=True, exist_ok=True)
    known = circumstances("cuda")
    name = re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name(0).lower()).strip("-")
    ran: list[Ran] = []
    for part in parts(args.output, quick=args.quick, parity_seconds=60 if args.quick else args.parity_seconds):
        print(f"{part.title}: {' '.join(part.command[1:])}", flush=True)
        ran.append(run_part(part))
        print(f"{part.title}: {ran[-1].outcome} after {ran[-1].seconds:.0f} s", flush=True)
        (args.output / f"gpu-{name}.md").write_text(report(known, ran), encoding="utf-8")
        summary = [{"title": one.title, "outcome": one.outcome, "seconds": one.seconds} for one in ran]
        (args.output / f"gpu-{name}.json").write_text(json.dumps({"circumstances": known, "parts": summary}, indent=2))
    sys.exit(0 if all(one.outcome == "succeeded" for one in ran) else 1)


if __name__ == "__main__":
    main()
