"""Compute the data digest that a job must end with, from its data alone: without ranks, model or checkpoint.

Run as `python -m meshwright_worker.expected_digest JOB.yaml`. The digest in the last checkpoint of a job is the same
exactly if training used each sample once, through all restarts and resizes. The data must be where a worker sees them:
name the mounted volume of `data.claimName` with `--data`. Reads every sample of the run.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from meshwright.api.data import DataSpec
from meshwright.api.labels import KIND
from meshwright.api.parsing import InvalidSpecError, parse_spec
from meshwright.api.training import TrainingSpec
from meshwright.data.errors import DataError
from meshwright.kube_yaml import load_documents
from meshwright_worker.data.mixture import Stream, open_stream
from meshwright_worker.data.sample_assignment import is_federated
from meshwright_worker.data.sample_order import SampleDigest

_ROWS = 1024
"""Samples that are read at once."""


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m meshwright_worker.expected_digest", description=__doc__)
    parser.add_argument("job", type=Path, metavar="JOB.yaml", help="Manifest with one job; `-` reads standard input.")
    parser.add_argument("--data", metavar="DIR", help="Directory where the volume of `data.claimName` is mounted.")
    parser.add_argument("--steps", type=int, help="Steps of the run (default: `training.steps`).")
    arguments = parser.parse_args()
    try:
        spec = parse_spec(read_job(arguments.job))
        if spec.training is None or spec.data is None:
            raise ValueError("the job has no `training` and `data`: Meshwright does not read the data of a command")
        steps = spec.training.steps if arguments.steps is None else arguments.steps
        digest = expected_digest(spec.data, spec.training, steps, arguments.data, spec.replicas)
    except (OSError, DataError, InvalidSpecError, yaml.YAMLError, ValueError) as error:
        parser.exit(1, f"{parser.prog}: error: {error}\n")  # the usage would not help
    sys.stdout.write(f"{digest:016x}\n")


def read_job(path: Path) -> dict[str, Any]:
    """Return the one job of a manifest.

    Raises:
        ValueError: there is none, or more than one.
    """
    text = sys.stdin.read() if str(path) == "-" else path.read_text()
    items = [item for item in load_documents(text) if isinstance(item, dict)]
    jobs = [item for item in items if item.get("kind") == KIND]
    if len(jobs) != 1:
        raise ValueError(f"{path}: expected exactly one {KIND}, found {len(jobs)}")
    return jobs[0]


def expected_digest(
    data: DataSpec, training: TrainingSpec, steps: int, data_dir: str | None = None, replicas: int = 1
) -> int:
    """Return the digest of the samples that a run consumes in this many steps, a number below 2^63.

    Args:
        data: The job's data.
        training: The job's training.
        steps: Steps of the run.
        data_dir: Root of the mounted data volume, if the job has one.
        replicas: Number of islands with a corpus of their own, where `training.outer` does not say.

    Raises:
        DataError: the data cannot be read, or are too few.
    """
    digest, samples = SampleDigest(), steps * training.global_batch_size
    for stream, count in _streams(data, training, samples, data_dir, replicas):
        for first in range(0, count, _ROWS):
            numbers = range(first, min(first + _ROWS, count))
            digest.add(numbers, stream.rows(numbers))
    return digest.value


def _streams(
    data: DataSpec, training: TrainingSpec, samples: int, data_dir: str | None, replicas: int
) -> Iterator[tuple[Stream, int]]:
    """Yield each stream of the run, and how many of its samples the run consumes."""
    outer = training.outer
    islands = (outer.islands or replicas) if outer is not None and is_federated(training) else 1
    for island in range(islands):
        own_dir = data_dir if islands == 1 or data_dir is None else str(Path(data_dir) / f"island-{island}")
        yield open_stream(data, own_dir, training.sequence_length, training.seed), samples // islands


if __name__ == "__main__":
    main()
