"""Everything that only a GPU can show, in one run: tests, throughput with profiles, and one report of them.

    python -m benchmarks.gpu [--quick] [--parity-seconds SECONDS] [--within SECONDS] [--output DIRECTORY]

`make gpu` runs it. A part that fails, crashes or takes too long does not stop the others. The report is written again
after each part, because machines with GPUs are lent for a time, and the full output of all parts is in a log beside it.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from benchmarks._circumstances import circumstances

OUTPUT = Path(__file__).parent / "results"
_LAST_LINES = 40
_PROCESSES = max(1, min(8, (os.cpu_count() or 1) // 2))
"""That run tests: importing torch and compiling take more of their time than the GPU."""
_LEAST_PARITY = 60.0
"""Seconds for the parity matrix, if all parts share a limited time."""
_ALLOCATOR = (("PYTORCH_ALLOC_CONF", "expandable_segments:True"),)
_FAILURE = re.compile(r"^(FAILED|ERROR) ")
"""A line of pytest's summary that names a test."""
SUCCEEDED = "succeeded"
_TOO_SLOW = "did not end within"
_NOT_RUN = "was not run"
_SLOWER = 1.5
"""A machine may take this many times as long as usual before a part counts as hanging: half of a result is none."""
_PROBE = "import torch; print(torch.compile(lambda x: x * 2 + 1)(torch.ones(4096, device='cuda')).sum().item())"


@dataclass(frozen=True)
class Part:
    """A command of the run."""

    title: str
    command: tuple[str, ...]
    limit: float
    """Seconds."""
    environment: tuple[tuple[str, str], ...] = ()
    """Variables that it gets in addition."""
    usual: float = 0.0
    """Seconds that it takes on an H200 with 16 CPUs of which nothing is in a cache yet."""
    compiles: bool = False
    """Whether all of it needs torch's compiler."""
    shortens: bool = False
    """Whether it takes the time that its option `--seconds` says."""


@dataclass(frozen=True)
class Ran:
    """What a part came to."""

    title: str
    outcome: str
    seconds: float
    text: str


def card_name(device: str) -> str:
    """The GPU's name as part of a file's name."""
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")


def parts(output: Path, name: str, *, quick: bool, parity_seconds: float) -> list[Part]:
    """The parts in order: what is right first, then how fast it is. Their files have the GPU's `name`."""
    small = ("--quick",) if quick else ()
    python, throughput = sys.executable, str(output / f"throughput-{name}.json")
    # With `-k`, no page is written. The rows take turns on the GPU, and there are more than a thousand.
    rows = ("-k", "=", "--seconds", f"{parity_seconds:g}", "--json", str(output / f"parity-{name}.json"))
    tests = ("-m", "pytest", "-q", "--tb=short", "-n", str(_PROCESSES), "-m", "cuda", "tests/cuda")
    return [
        # Without a C compiler or Python's headers, the first kernel of torch's compiler fails: found out in seconds.
        Part("Compiler", (python, "-c", _PROBE), 120, usual=30),
        Part("Tests", (python, *tests), 900, usual=120),
        Part(
            "Parity",
            (python, "-m", "tests.parity", *rows),
            parity_seconds + 300,
            (("MESHWRIGHT_TEST_DEVICE", "cuda"),),
            usual=_LEAST_PARITY,
            shortens=True,
        ),
        Part(
            "Throughput",
            (python, "-m", "benchmarks.throughput", "--device", "cuda", "--json", throughput, *small),
            2400,
            _ALLOCATOR,
            usual=345,
            compiles=True,
        ),
    ]


def limited(part: Part, later: Sequence[Part], left: float) -> Part:
    """The part with the time that it has, when `left` seconds are left for it and the later ones.

    It gets what the later ones do not need. If that is little, it goes before them: the first parts are the ones that
    matter most.
    """
    own = left - sum(other.usual for other in later)
    least = part.usual if part.shortens else part.usual * _SLOWER
    limit = max(min(part.limit, own), min(least, left), 1.0)
    command = [*part.command]
    if part.shortens:
        value = command.index("--seconds") + 1
        # The rows that have begun still take their time.
        command[value] = f"{min(float(command[value]), max(1.0, limit * 0.8 - 10)):g}"
    return replace(part, limit=limit, command=tuple(command))


def too_late(part: Part, left: float) -> Ran | None:
    """Why a part is not begun, if less time is left than it takes on a fast machine."""
    if left * 2 >= part.usual:
        return None
    return Ran(part.title, _NOT_RUN, 0.0, f"{max(left, 0):.0f} s are left, and it usually takes {part.usual:.0f} s")


def run_part(part: Part) -> Ran:
    """Run a part; what it printed is kept if it takes too long, too. Then its processes are killed: all of them."""
    began = time.monotonic()
    # Not a pipe: a process that the part left behind would keep it open.
    with tempfile.TemporaryFile() as printed:
        try:
            process = subprocess.Popen(
                part.command,
                stdout=printed,
                stderr=subprocess.STDOUT,
                env={**os.environ, **dict(part.environment)},
                start_new_session=True,
            )
        except OSError as error:
            return Ran(part.title, f"could not be started: {error}", 0.0, "")
        try:
            code = process.wait(part.limit)
            outcome = SUCCEEDED if code == 0 else f"failed with exit status {code}" if code > 0 else _killed(-code)
        except subprocess.TimeoutExpired:
            outcome = f"{_TOO_SLOW} {part.limit:.0f} s"
        finally:
            # Ranks that outlive their parent would occupy the GPU that the next part measures.
            _kill_session(process)
        printed.seek(0)
        return Ran(part.title, outcome, time.monotonic() - began, printed.read().decode(errors="replace"))


def _killed(number: int) -> str:
    return f"was ended by {signal.Signals(number).name}"


def _kill_session(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def last_line(ran: Ran) -> str:
    """What it printed last."""
    lines = ran.text.strip().splitlines()
    return lines[-1].strip() if lines else "it printed nothing"


def without_compiler(part: Part, probe: Ran) -> Ran | None:
    """Why a part cannot run, if torch's compiler does not work. One that is only slow may."""
    if not part.compiles or probe.outcome == SUCCEEDED or probe.outcome.startswith(_TOO_SLOW):
        return None
    reason = f"torch.compile does not work here ({last_line(probe)})"
    hint = "It needs `gcc` or `clang` (or the variable `CC`) and the headers of this Python, such as `python3-dev`."
    return Ran(part.title, _NOT_RUN, 0.0, f"{reason}. {hint}")


def report(known: dict[str, object], ran: Sequence[Ran]) -> str:
    """The report as Markdown: the outcomes, what failed, and the last lines of each part."""
    lines = ["# Results on a GPU", "", *(f"- {name}: {value}" for name, value in known.items()), ""]
    lines += ["| Part | Outcome | Seconds |", "|---|---|---|"]
    lines += [f"| {each.title} | {each.outcome} | {each.seconds:.0f} |" for each in ran]
    lines += [""]
    for each in ran:
        lines += [f"## {each.title}", "", f"It {each.outcome} after {each.seconds:.0f} s.", "", "```text"]
        printed = each.text.strip().splitlines()
        # More tests may have failed than the last lines have place for.
        lines += [line for line in printed[:-_LAST_LINES] if _FAILURE.match(line)]
        lines += [*printed[-_LAST_LINES:], "```", ""]
    return "\n".join(lines)


def run_all(planned: Sequence[Part], seconds: float | None, save: Callable[[Sequence[Ran]], None]) -> list[Ran]:
    """Run the parts one after the other, all within `seconds` if given, and save the outcomes after each."""
    began = time.monotonic()
    ran: list[Ran] = []
    for number, part in enumerate(planned):
        left = math.inf if seconds is None else seconds - (time.monotonic() - began)
        if left < math.inf:
            part = limited(part, planned[number + 1 :], left)
        print(f"{part.title}: {' '.join(part.command[1:])}", flush=True)
        refused = too_late(part, left) or (without_compiler(part, ran[0]) if ran else None)
        ran.append(refused or run_part(part))
        failed = "" if ran[-1].outcome == SUCCEEDED else f": {last_line(ran[-1])}"
        print(f"{part.title}: {ran[-1].outcome} after {ran[-1].seconds:.0f} s{failed}", flush=True)
        save(ran)
    return ran


def main() -> None:
    """Run all parts; exit status 1 if one failed, 2 without a GPU."""
    args = _parser().parse_args()
    if not torch.cuda.is_available():
        print("there is no GPU that torch can use: run this on a machine with one", file=sys.stderr)
        sys.exit(2)
    args.output.mkdir(parents=True, exist_ok=True)
    known = circumstances("cuda")
    name = card_name(torch.cuda.get_device_name(0))
    seconds = 60 if args.quick else args.parity_seconds
    planned = parts(args.output, name, quick=args.quick, parity_seconds=seconds)

    def save(ran: Sequence[Ran]) -> None:
        (args.output / f"gpu-{name}.md").write_text(report(known, ran), encoding="utf-8")
        summary = [{"title": one.title, "outcome": one.outcome, "seconds": one.seconds} for one in ran]
        (args.output / f"gpu-{name}.json").write_text(json.dumps({"circumstances": known, "parts": summary}, indent=2))
        log = "\n".join(f"===== {one.title}: {one.outcome}\n{one.text}" for one in ran)
        (args.output / f"gpu-{name}.log").write_text(log, encoding="utf-8")

    ran = run_all(planned, args.within, save)
    sys.exit(0 if all(one.outcome == SUCCEEDED for one in ran) else 1)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two layers of each model: whether it runs, not how fast")
    parser.add_argument(
        "--parity-seconds", type=float, default=600, help="start no row of the parity matrix after this time"
    )
    parser.add_argument("--within", type=float, help="seconds for all parts: each ends in time for the later ones")
    parser.add_argument("--output", type=Path, default=OUTPUT, help="directory of the report")
    return parser


if __name__ == "__main__":
    main()
