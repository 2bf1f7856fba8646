"""What the ranks of a case run: they train, and compare what they hold of every tensor with what one process computed.

Comparing where the tensors are costs no gathering, which is most of a small case's collectives.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from meshwright.api.precision import Precision
from meshwright.protocol.run_config import NativeRun
from meshwright_worker.local_sgd.async_sgd import AsynchronousSGD
from meshwright_worker.local_sgd.bounded_staleness import Event
from meshwright_worker.parallel.shards import ParameterShard
from meshwright_worker.rank.task import RankTask
from tests.distributed.cases import Trained, Training, in_format, trained
from tests.distributed.mesh_cache import kept_mesh, uses_kept_mesh
from tests.parity.definitions import as_defined
from tests.parity.losses import RankNumbers, digest, hexadecimal

Boxes = Mapping[str, tuple[tuple[int, int], ...]]
"""By name, the first index of each dimension and the one after the last."""
Events = Mapping[Precision, list[Event]]


@dataclass(frozen=True)
class Reference:
    """What one process computed: losses of the steps, gradients of the first, parameters and buffers at the end."""

    losses: list[float]
    gradients: dict[str, torch.Tensor]
    parameters: dict[str, torch.Tensor]


@dataclass(frozen=True)
class Compared:
    """How far one rank is from the reference, tensor by tensor, relative to the whole tensor's largest element."""

    losses: list[float]
    gradients: dict[str, float]
    parameters: dict[str, float]
    largest: dict[str, float]
    """Of each gradient the largest element."""
    boxes: Boxes
    """Where this rank's part of each trained parameter lies in the whole."""
    numbers: RankNumbers
    """What it computed, exactly."""


@dataclass(frozen=True)
class Told:
    """One rank's part of an asynchronous run, and the order that its server wrote down, where it has one."""

    island: int
    own: Trained
    events: list[Event]


@uses_kept_mesh
def train_as_reference(
    task: RankTask, steps: Mapping[Precision, int], path: Path, definition: NativeRun, events: Events | None = None
) -> None:
    """So many steps in each number format, each from the start, written to a file for `train_and_compare`.

    `definition` is a run whose semantics are wanted, see `as_defined`.
    """
    with kept_mesh(task) as mesh:
        runs = {
            precision: as_defined(
                in_format(task.run, precision), definition, mesh, count, events[precision] if events else None
            )
            for precision, count in steps.items()
        }
    arrays = {
        precision: [
            ([result.loss for result in each.results], _arrays(each.gradients), _arrays(each.parameters))
            for each in islands
        ]
        for precision, islands in runs.items()
    }
    path.write_bytes(pickle.dumps(arrays))


def references(path: Path) -> dict[Precision, list[Reference]]:
    """What `train_as_reference` wrote, by island."""
    # As arrays, since reading a tensor costs far more than its bytes.
    stored = pickle.loads(path.read_bytes())  # noqa: S301
    return {
        precision: [
            Reference(losses, _tensors(gradients), _tensors(parameters)) for losses, gradients, parameters in islands
        ]
        for precision, islands in stored.items()
    }


@uses_kept_mesh
def train_and_compare(task: RankTask, steps: Mapping[Precision, int], path: Path) -> dict[Precision, Compared]:
    """The same steps in the run's layout: how far this rank's part is from the reference."""
    wants = references(path)
    with kept_mesh(task) as mesh:
        return {
            precision: compared(
                trained(in_format(task.run, precision), mesh, count, _local), wants[precision][mesh.island]
            )
            for precision, count in steps.items()
        }


@uses_kept_mesh
def train_and_tell(task: RankTask, steps: Mapping[Precision, int]) -> dict[Precision, Told]:
    """The same where the reference follows from what the ranks did: their part, to be compared later."""
    told = {}
    with kept_mesh(task) as mesh:
        for precision, count in steps.items():
            training = Training(in_format(task.run, precision), mesh, _local)
            for number in range(1, count + 1):
                training.step(number)
            outer = training.trainer.outer
            server = outer.server if isinstance(outer, AsynchronousSGD) else None
            own = training.told()
            told[precision] = Told(mesh.island, own, list(server.order.events) if server else [])
    return told


def _local(_: ParameterShard, local: torch.Tensor) -> torch.Tensor:
    return local.detach().clone()


def compared(got: Trained, want: Reference) -> Compared:
    gradients = {name: _error(tensor, want.gradients, name, got) for name, tensor in got.gradients.items()}
    parameters = {name: _error(tensor, want.parameters, name, got) for name, tensor in got.parameters.items()}
    losses = [
        abs(result.loss - expected) / abs(expected) for result, expected in zip(got.results, want.losses, strict=True)
    ]
    largest = {name: _largest(tensor) for name, tensor in got.gradients.items()}
    boxes = {name: tuple((part.start, part.stop) for part in box) for name, box in got.boxes.items()}
    numbers = RankNumbers(
        hexadecimal(result.loss for result in got.results), digest(got.gradients), digest(got.parameters)
    )
    return Compared(losses, gradients, parameters, largest, boxes, numbers)


def _error(part: torch.Tensor, wants: Mapping[str, torch.Tensor], name: str, got: Trained) -> float:
    if name not in wants:
        return float("inf")
    whole = wants[name]
    # Buffers are whole on every rank.
    expected = whole[got.boxes[name]] if name in got.boxes else whole
    if part.shape != expected.shape:
        return float("inf")
    # An adapter's first gradient is exactly 0: its other matrix still is.
    return _largest(part - expected) / (_largest(whole) or 1.0)


def _arrays(tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    # There are no arrays of bf16.
    return {
        name: (tensor.float() if tensor.dtype is torch.bfloat16 else tensor).numpy() for name, tensor in tensors.items()
    }


def _tensors(arrays: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def _largest(tensor: torch.Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0
