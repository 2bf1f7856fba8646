"""How much an attacker on one core slows honest agents of a coordinator on another core, and how much memory it costs.

    python benchmarks/coordinator_hostile.py [--quick] [--only ATTACK] [--json FILE]

64 agents report every second on the connections that they keep. Each attack is measured after a round without one, in
which the attacker's process only spins, so that the agents always share their core. A second process always spins
there: an attacker that waits for the server would let the core sleep, and waking up takes longer than an answer. Needs
two cores (Linux).
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
from _report import table, write_json

ATTACKS = ("unsigned", "silent", "bodies", "replayed", "future", "impostor")
PROCESSES = str(Path(__file__).with_name("_hostile_processes.py"))


@contextmanager
def process(core: int, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    """A process of the benchmark on this core, until the block ends."""
    argv = ["taskset", "-c", str(core), sys.executable, PROCESSES, *map(str, arguments)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as started:
        try:
            yield started
        finally:
            started.kill()


def resident_mib(pid: int) -> float:
    """The process's resident memory."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    return 0.0


def cpu_seconds(pid: int) -> float:
    """The CPU time that the process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def round_of(kind: str, server: int, port: int, cores: tuple[int, int], seconds: float) -> dict[str, Any]:
    """What honest agents and the coordinator experience during an attack."""
    with process(cores[1], "attack", "none", port), process(cores[1], "attack", kind, port):
        time.sleep(1.0)
        used, began = cpu_seconds(server), time.monotonic()
        with process(cores[1], "report", port, seconds) as agents:
            assert agents.stdout is not None
            numbers: dict[str, Any] = json.loads(agents.stdout.readline())
        numbers["cpu"] = (cpu_seconds(server) - used) / (time.monotonic() - began)
        numbers["rss_mib"] = resident_mib(server)
    return numbers


def measure(attacks: tuple[str, ...], rounds: int, seconds: float) -> dict[str, Any]:
    """Medians over the rounds, by attack; each with those of the rounds without attack just before it."""
    first, second, *_ = sorted(os.sched_getaffinity(0))
    results: dict[str, Any] = {}
    for kind in attacks:
        pairs = []
        with process(first, "serve") as server:
            assert server.stdout is not None
            port = int(server.stdout.readline())
            for _ in range(rounds):
                calm = round_of("none", server.pid, port, (first, second), seconds)
                pairs.append((calm, round_of(kind, server.pid, port, (first, second), seconds)))
        results[kind] = {
            name: [statistics.median(pair[side][name] for pair in pairs) for side in (0, 1)]
            for name in ("p50_ms", "p95_ms", "rss_mib", "cpu", "failures")
        }
    return results


@click.command()
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Write the numbers here.")
@click.option("--quick", is_flag=True, help="One short round of each attack.")
@click.option("--only", multiple=True, type=click.Choice(ATTACKS), help="Repeat for several.")
def main(json_file: Path | None, quick: bool, only: tuple[str, ...]) -> None:
    """Measure what attacks cost honest agents and the coordinator."""
    results = measure(only or ATTACKS, 1 if quick else 5, 5.0 if quick else 20.0)
    rows = []
    for kind, numbers in results.items():
        row: list[object] = [kind]
        for name in ("p50_ms", "p95_ms", "rss_mib"):
            calm, attacked = numbers[name]
            row += [float(calm), float(attacked), f"{attacked / calm - 1:+.0%}"]
        rows.append([*row, float(numbers["cpu"][0]), float(numbers["cpu"][1]), numbers["failures"][1]])
    columns = ["attack", "p50 ms", "attacked", "", "p95 ms", "attacked", "", "RSS MiB", "attacked", ""]
    table("Honest agents, without and with an attack", [*columns, "cores", "attacked", "failures"], rows)
    write_json(json_file, results)


if __name__ == "__main__":
    main()
