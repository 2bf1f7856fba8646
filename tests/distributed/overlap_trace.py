"""A trace of one rank's step, with times: exchanges of tokens from issue to completion, and matrix products."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from meshwright.schedules.actions import Action, Slot
from meshwright_worker.data.batch import Batch
from meshwright_worker.parallel.expert.dispatch import Exchange, PendingExchange
from meshwright_worker.parallel.pipeline import schedule_executor
from meshwright_worker.parallel.pipeline.schedule_executor import ScheduleExecutor
from meshwright_worker.rank.task import RankTask
from meshwright_worker.trainer.trainer import Trainer
from tests.distributed.cases import samples_of
from tests.distributed.mesh_cache import kept_mesh, uses_kept_mesh
from tests.distributed.op_recorder import EveryPass

PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm")


@dataclass(frozen=True)
class Span:
    """What a pass did, in seconds of a clock that all threads share."""

    of: Action
    began: float
    ended: float

    def holds(self, other: Span) -> bool:
        return self.began < other.began and other.ended < self.ended


@dataclass
class Trace:
    exchanges: list[Span]
    products: list[Span]
    pairs: list[Slot]
    """The slots of two actions in this rank's order."""

    def hidden(self, exchanging: Action, computing: Action) -> list[tuple[Span, Span]]:
        """Products of one pass that began after an exchange of the other had begun, and ended before that ended."""
        return [
            (exchange, product)
            for exchange in self.exchanges
            for product in self.products
            if exchange.of == exchanging and product.of == computing and exchange.holds(product)
        ]


class _Tracing(EveryPass):
    """Takes the times of products, and of exchanges from `Exchange.begin` until `PendingExchange.wait` returns."""

    def __init__(self) -> None:
        super().__init__()
        self.exchanges: list[Span] = []
        self.products: list[Span] = []
        self._passes: dict[int, Action] = {}
        self._issued: dict[int, tuple[Action, float]] = {}
        self._begin, self._wait = Exchange.begin, PendingExchange.wait

    def runs(self, action: Action) -> None:
        """This thread runs the pass from now on."""
        self._passes[threading.get_ident()] = action

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        began = time.perf_counter()
        output = func(*args, **(kwargs or {}))
        if func._schema.name in PRODUCTS:
            self.products.append(Span(self._now(), began, time.perf_counter()))
        return output

    def begin(self, exchange: Exchange, rows: torch.Tensor) -> PendingExchange:
        pending = self._begin(exchange, rows)
        self._issued[id(pending)] = self._now(), time.perf_counter()
        return pending

    def wait(self, pending: PendingExchange) -> torch.Tensor:
        received = self._wait(pending)
        action, began = self._issued.pop(id(pending))
        self.exchanges.append(Span(action, began, time.perf_counter()))
        return received

    def _now(self) -> Action:
        return self._passes[threading.get_ident()]


class _Traced(schedule_executor._Step):
    def __init__(self, tracing: _Tracing, *more: Any) -> None:
        super().__init__(*more)
        self._tracing = tracing

    def _train(self, action: Action) -> torch.Tensor | None:
        self._tracing.runs(action)
        return super()._train(action)


@uses_kept_mesh
def trace_a_step(task: RankTask, apart: bool) -> Trace:
    """The trace; with `apart` the actions of a pair run one after the other."""
    model, training = task.run.architecture, task.run.training
    with kept_mesh(task) as mesh:
        trainer = Trainer(task.run, mesh)
        executor = trainer._executor
        assert isinstance(executor, ScheduleExecutor)
        pairs = [slot for slot in executor.schedule.ranks[mesh.coordinates.pipeline] if len(slot) == 2]
        if apart:
            executor.set_schedule(executor.schedule.serialized())
        share = training.global_batch_size // mesh.layout.data
        samples = samples_of(1, training.global_batch_size, training.sequence_length, model.vocab_size)
        batch = Batch.of(samples[mesh.coordinates.data * share :][:share])
        tracing, real = _Tracing(), schedule_executor._Step
        schedule_executor._Step = partial(_Traced, tracing)  # type: ignore[assignment, misc]
        Exchange.begin = lambda *given: tracing.begin(*given)  # type: ignore[method-assign]
        PendingExchange.wait = lambda *given: tracing.wait(*given)  # type: ignore[method-assign]
        try:
            with tracing:
                executor.run(batch.chunk(task.run.micro_batches))
        finally:
            schedule_executor._Step = real  # type: ignore[misc]
            Exchange.begin, PendingExchange.wait = tracing._begin, tracing._wait  # type: ignore[method-assign]
        return Trace(tracing.exchanges, tracing.products, pairs)
