"""Compute the data digest that a job must end with, from its data alone: without ranks, model or checkpoint.

Run as `python -m meshwright_worker.expected_digest JOB.yaml`. The digest in the last checkpoint of a job is the same
exactly if training used each sample once, through all restarts and resizes. The data must be where a worker sees them:
name the mounted volume of `data.claimName` with `--data`. Reads every sample of the run. If the batch has changed, name
the number of samples with `--samples`.
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
from meshwright.api.spec import ParallelTrainingJobSpec
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
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--steps", type=_count, help="Steps of the run (default: `training.steps`).")
    length.add_argument(
        "--samples",
        type=_count,
        help="Samples of the run, if its batch has changed: `state.samples` in `meshwright.json` of its checkpoint.",
    )
    arguments = parser.parse_args()
    try:
        spec = parse_spec(read_job(arguments.job))
        if spec.training is None or spec.data is None:
            raise ValueError("the job has no `training` and `data`: Meshwright does not read the data of a command")
        samples = arguments.samples
        if samples is None:
            samples = samples_of(spec, arguments.steps)
        digest = digest_of(spec.data, spec.training, samples, arguments.data, spec.replicas)
    except (OSError, DataError, InvalidSpecError, yaml.YAMLError, ValueError) as error:
        parser.exit(1, f"{parser.prog}: error: {error}\n")  # the usage would not help
    sys.stdout.write(f"{digest:016x}\n")


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"must be an integer of at least 0, got {text!r}")
    return int(text)


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


def samples_of(spec: ParallelTrainingJobSpec, steps: int | None) -> int:
    """How many samples a run has in so many steps, or in all.

    Raises:
        ValueError: it depends on how many replicas the job had.
    """
    assert spec.training is not None
    if spec.elastic is not None and spec.elastic.scaled_batch is not None:
        raise ValueError(
            "with `elastic.scaledBatch` the samples of a step follow from its replicas: pass --samples, which is "
            "`state.samples` in `meshwright.json` of the job's checkpoint"
        )
    return (spec.training.steps if steps is None else steps) * spec.training.global_batch_size


def expected_digest(
    data: DataSpec, training: TrainingSpec, steps: int, data_dir: str | None = None, replicas: int = 1
) -> int:
    """Return the digest of the samples that a run consumes in this many steps, as `digest_of`."""
    return digest_of(data, training, steps * training.global_batch_size, data_dir, replicas)


def digest_of(
    data: DataSpec, training: TrainingSpec, samples: int, data_dir: str | None = None, replicas: int = 1
) -> int:
    """Return the digest of the first samples of a run, a number below 2^63.

    Args:
        data: The job's data.
        training: The job's training.
        samples: How many.
        data_dir: Root of the mounted data volume, if the job has one.
        replicas: Number of islands with a corpus of their own, where `training.outer` does not say.

    Raises:
        DataError: the data cannot be read, or are too few.
    """
    digest = SampleDigest()
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
