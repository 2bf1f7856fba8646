"""What one process computes for techniques that do not take the steps of a single process: their written semantics.

- A pipeline without a flush takes each stage's gradient at weights of some updates ago, see `pipeline.stale`.
- Islands take their steps apart and meet after a round, see `outer`.
- Islands with a parameter server update it in the order that it wrote down.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from meshwright.api.parallelism import PipelineSchedule
from meshwright.api.training import OuterMethod, OuterSpec
from meshwright.protocol.run_config import NativeRun
from meshwright.schedules.pipeline_layout import layers_of_stages
from meshwright.schedules.registry import kind_of
from meshwright_worker.distributed.mesh import Mesh
from meshwright_worker.local_sgd.bounded_staleness import Event
from meshwright_worker.local_sgd.outer_optimizer import RoundSchedule
from meshwright_worker.optimizers.adamw import AdamW
from tests.distributed.cases import FEDERATED, Trained, Training, trained

Weights = dict[str, torch.Tensor]


def as_defined(
    run: NativeRun, definition: NativeRun, mesh: Mesh, steps: int, events: Sequence[Event] | None
) -> list[Trained]:
    """What each island of `definition` comes to, one where there are none, computed by the mesh's only rank.

    Args:
        run: of one process, or of one island of it.
        definition: the layout whose semantics it has.
        mesh: of one rank.
        steps: of each island.
        events: of a parameter server.
    """
    outer = definition.training.outer if definition.training else None
    if outer is not None:
        islands = [Training(run, mesh, island=number, among=definition.islands) for number in range(definition.islands)]
        if outer.method is OuterMethod.ASYNC_SGD:
            assert events is not None
            return _replayed(islands, run, outer, steps, events)
        return _in_rounds(islands, run, outer, steps)
    if definition.pipeline > 1 and kind_of(definition.parallelism.order).asynchronous:
        late = Late(run, mesh, _late(definition))
        for number in range(1, steps + 1):
            late.step(number)
        return [late.told()]
    return [trained(run, mesh, steps)]


class Late(Training):
    """Takes each gradient at weights of some updates ago; `late` says of how many, by layer, embedding and head."""

    def __init__(self, run: NativeRun, mesh: Mesh, late: Mapping[str, int]) -> None:
        super().__init__(run, mesh)
        self._late = late
        self._versions = [self._now()]

    def step(self, number: int) -> None:
        self._set({name: self._versions[max(0, number - self._late[_place(name)])][name] for name in self._now()})
        super().step(number)

    def take(self, gradients: Sequence[torch.Tensor], rate: float) -> None:
        self._set(self._versions[-1])
        super().take(gradients, rate)
        self._versions.append(self._now())

    def _now(self) -> Weights:
        return {shard.name: shard.local.detach().clone() for shard in self.trainer.shards}

    @torch.no_grad()
    def _set(self, weights: Weights) -> None:
        for shard in self.trainer.shards:
            shard.local.copy_(weights[shard.name])


def _late(run: NativeRun) -> dict[str, int]:
    model, training = run.architecture, run.training
    stages = layers_of_stages(run.parallelism, run.pipeline, model, training.sequence_length)
    double = run.parallelism.order is PipelineSchedule.PIPEDREAM_2BW
    late = [2 if double else run.pipeline - stage for stage in range(run.pipeline)]
    of_layers = {f"layers.{layer}": late[stage] for stage, layers in enumerate(stages) for layer in layers}
    return {**of_layers, "first": late[0], "last": late[-1]}


def _place(parameter: str) -> str:
    part = parameter.split(".")
    if part[0] == "layers":
        return ".".join(part[:2])
    return "first" if part[0] in ("embedding", "positions") else "last"


def _in_rounds(islands: list[Training], run: NativeRun, outer: OuterSpec, steps: int) -> list[Trained]:
    """Rounds and a weighted mean; for DiLoCo, torch's Nesterov SGD on it."""
    weights = [1 / len(islands)] * len(islands)
    if outer.method is OuterMethod.FED_AVG:
        weights = [samples / sum(FEDERATED) for samples in FEDERATED]
    training = run.training
    rounds = RoundSchedule(outer.every_steps, training.steps)
    shared = [shard.local.detach().clone() for shard in islands[0].trainer.shards]
    rate, momentum = (outer.learning_rate, outer.momentum) if outer.method is OuterMethod.DILOCO else (1.0, 0.0)
    sgd = torch.optim.SGD(shared, lr=rate, momentum=momentum, nesterov=momentum > 0)
    for number in range(1, steps + 1):
        for island in islands:
            island.step(number)
        if rounds.ends_round(number):
            for index, value in enumerate(shared):
                value.grad = value - _mean([island.trainer.shards[index].local for island in islands], weights)
            sgd.step()
            for island in islands:
                _fill(island, shared)
            _average_buffers(islands, weights)
    return [island.told() for island in islands]


def _replayed(
    islands: list[Training], run: NativeRun, outer: OuterSpec, steps: int, events: Sequence[Event]
) -> list[Trained]:
    """The reads and writes of a server one after the other."""
    training = run.training
    server = islands[0].trainer.shards
    parameters = [shard.local.detach().clone() for shard in server]
    copies = [
        replace(shard, local=own, parameter=nn.Parameter(own)) for shard, own in zip(server, parameters, strict=True)
    ]
    optimizer = AdamW(copies, training.optimizer)
    taken: dict[int, tuple[list[torch.Tensor], float]] = {}
    begun = [0] * len(islands)
    for index, island in enumerate(islands):
        island.catch(partial(_catch, island, taken, index))
    for event in events:
        if event.kind == "read":
            begun[event.island] += 1
            _fill(islands[event.island], parameters)
            islands[event.island].step(begun[event.island])
        else:
            optimizer.step(*taken.pop(event.island))
    assert begun == [steps] * len(islands)
    if RoundSchedule(outer.every_steps, training.steps).ends_round(steps):
        for island in islands:
            _fill(island, parameters)
        _average_buffers(islands, [1 / len(islands)] * len(islands))
    return [island.told() for island in islands]


def _catch(
    island: Training,
    taken: dict[int, tuple[list[torch.Tensor], float]],
    index: int,
    gradients: Sequence[torch.Tensor],
    rate: float,
) -> None:
    taken[index] = [gradient.clone() for gradient in gradients], rate
    island.trainer.optimizer.clear_gradients()


def _mean(tensors: Sequence[torch.Tensor], weights: Sequence[float]) -> torch.Tensor:
    return torch.stack([weight * tensor for weight, tensor in zip(weights, tensors, strict=True)]).sum(0)


@torch.no_grad()
def _fill(island: Training, parameters: Sequence[torch.Tensor]) -> None:
    for shard, value in zip(island.trainer.shards, parameters, strict=True):
        shard.local.copy_(value)


def _average_buffers(islands: list[Training], weights: Sequence[float]) -> None:
    for name in islands[0].trainer.buffers:
        mean = _mean([island.trainer.buffers[name] for island in islands], weights)
        for island in islands:
            island.trainer.buffers[name].copy_(mean)
