"""Training without a flush: each stage updates its weights by itself, and what all ranks must know comes steps later.

See `pipeline.stale` for which weights a gradient is taken at. There is no moment at which a step's gradients are known
everywhere, so their global norm clips nothing, and what a step came to is told when it has reached every rank. Before a
checkpoint, and at the end, the pipeline drains: after that all stages have made the same number of updates.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist

from meshwright.api.parallelism import PipelineSchedule
from meshwright.api.training import TrainingSpec
from meshwright.models.architecture import Architecture
from meshwright.protocol import RunConfig
from meshwright_worker.checkpoint.manifest import TrainingState
from meshwright_worker.data.batch import Batch
from meshwright_worker.evaluate import mean_loss
from meshwright_worker.mesh import TENSOR, Mesh
from meshwright_worker.micro_batches import Fed, MicroBatches
from meshwright_worker.optimizer import learning_rate
from meshwright_worker.optimizers.build import build_optimizer
from meshwright_worker.outer.outer import Outer
from meshwright_worker.parallel.apply import build_stages
from meshwright_worker.parallel.gradients import rescale, square_sum, sum_partial
from meshwright_worker.parallel.replicas import replicas_of
from meshwright_worker.parallel.shards import Shard, shards_of
from meshwright_worker.pipeline.channels import Channels
from meshwright_worker.pipeline.executor import tokens_of_step
from meshwright_worker.pipeline.stale import StalePipeline
from meshwright_worker.step import DivergedError, StepResult


class StaleTrainer:
    """`Trainer` for the schedules `PipeDream` and `PipeDream2BW`."""

    def __init__(self, run: RunConfig, model: Architecture, training: TrainingSpec, mesh: Mesh) -> None:
        self._mesh, self._training = mesh, training
        self.stages = build_stages(run, model, mesh)
        (stage,) = self.stages
        self._micro_batches = MicroBatches(run, mesh)
        shards = shards_of(stage.module, stage.distributed, run, mesh)
        self._replicas = replicas_of(run, [shard for shard in shards if shard.parameter.requires_grad], mesh)
        self.shards: Sequence[Shard] = self._replicas.shards
        self.outer: Outer | None = None
        self.memory = self._replicas.memory
        self.frozen: list[Shard] = [shard for shard in shards if not shard.parameter.requires_grad]
        self.buffers: dict[str, torch.Tensor] = {}
        self.optimizer = build_optimizer(self.shards, training, mesh)
        place, places = mesh.coordinates.pipeline, mesh.layout.pipeline
        pairs = {(one, one + 1) for one in range(places - 1)} | {(one + 1, one) for one in range(places - 1)}
        self._pipeline = StalePipeline(
            stage.module,
            place,
            places,
            double_buffered=run.parallelism.order is PipelineSchedule.PIPEDREAM_2BW,
            tokens=tokens_of_step(training),
            channels=Channels(mesh, pairs),
            width=model.hidden_size,
            slices=run.tensor if run.parallelism.sequence else 1,
            update=self._update,
        )
        # Reports travel on the host, so that no rank waits for the device of one that is steps behind.
        self._reports = dist.new_group(backend="gloo")
        replicas: tuple[dist.ProcessGroup, object] = dist.new_subgroups_by_enumeration(  # type: ignore[no-untyped-call]
            mesh.layout.replica_groups(), backend="gloo"
        )
        self._replicas_on_hosts, _ = replicas
        self._shares: dict[int, float] = {}
        self._fed: dict[int, Fed] = {}
        _, *others = mesh.coordinates
        self._speaks = self._micro_batches.padded and not any(others)
        """Whether this rank tells what the padded rows of its replica hold."""
        self._known: dict[int, torch.Tensor] = {}
        self._under_way: deque[tuple[int, torch.Tensor, dist.Work]] = deque()
        self._begun = self._told = 0
        self._stops = False

    def step(self, number: int, batch: Batch, *, stop: bool = False) -> StepResult | None:
        """Send the batch of step `number` into the pipeline.

        Returns:
            What an earlier step came to; None while the pipeline fills.

        Raises:
            DivergedError: that step's loss or gradients are not finite; weights have been updated with them.
        """
        parts = self._micro_batches.of(batch)
        places = self._mesh.layout.pipeline
        if self._told == 0:
            self._told = number
        self._begun = number
        self._shares[number] = self._share(batch)
        self._fed[number] = self._micro_batches.fed(batch) if self._speaks else Fed(0, 0)
        self._pipeline.feed(number, parts)
        self._tell(number - places + 1, stop)
        if len(self._under_way) <= places:
            return None
        return self._hear()

    def loaded(self, step: int) -> None:
        """See `Trainer.loaded`: every replica has whole parameters."""

    def close(self) -> None:
        """See `Trainer.close`."""

    def record(self, state: TrainingState) -> TrainingState:
        """See `Trainer.record`: there is nothing more to remember."""
        return state

    def resume(self, state: TrainingState) -> None:
        """See `Trainer.resume`."""

    def settle(self) -> list[StepResult]:
        """Drain the pipeline; what the steps came to that were not told yet. Collective."""
        if self._told == 0:
            return []
        self._pipeline.drain()
        first = max(self._told, self._begun - self._mesh.layout.pipeline + 2)
        for number in range(first, self._begun + 1):
            self._tell(number, stop=False)
        results = [result for result in (self._hear() for _ in range(len(self._under_way))) if result is not None]
        self._told = 0
        return results

    def evaluate(self, batches: Iterable[Batch]) -> float:
        """See `Trainer.evaluate`. The pipeline must be empty, as `settle` leaves it."""
        return mean_loss(self._pipeline.evaluate, (self._micro_batches.of(batch) for batch in batches), self._mesh)

    def _update(self, number: int, loss: torch.Tensor) -> None:
        """The stage's own update, when its part of a step's gradients is there."""
        gradients = self._replicas.reduce()
        if self._mesh.layout.tensor > 1:
            sum_partial(self.shards, gradients, self._mesh.group(TENSOR), self._mesh.device)
        share = self._shares.pop(number)
        squares = square_sum(self.shards, gradients).to(self._mesh.device)
        loss = loss.double() if self._mesh.coordinates.tensor == 0 else torch.zeros_like(squares)
        # Stays on the device until it is told, steps later: the host does not wait for this one.
        self._known[number] = torch.stack([loss * share, squares * share * share])
        rescale(gradients, share, 0.0, 0.0)
        self.optimizer.step(gradients, learning_rate(number, self._training.steps, self._training.optimizer))

    def _share(self, batch: Batch) -> float:
        """What corrects a step's gradient for the tokens that have no target: every stage knows them.

        Counted before the batch goes to the device, which is busy with the steps before.
        """
        targets = self._micro_batches.targets(batch).double()
        if self._mesh.layout.replicas > 1:
            dist.all_reduce(targets, group=self._replicas_on_hosts)
        return tokens_of_step(self._training) / max(1.0, float(targets))

    def _tell(self, number: int, stop: bool) -> None:
        known = self._known.pop(number, None)
        loss, squares = (0.0, 0.0) if known is None else known.tolist()
        sums = torch.tensor([loss, squares, float(stop), *self._fed.pop(number, Fed(0, 0))], dtype=torch.float64)
        work = dist.all_reduce(sums, group=self._reports, async_op=True)
        if work is None:
            raise RuntimeError("this rank is not among those that report")
        self._under_way.append((number, sums, work))

    def _hear(self) -> StepResult | None:
        number, sums, work = self._under_way.popleft()
        work.wait()
        loss, squares, stops, *held = sums.tolist()
        if number < self._told:
            self._stops = self._stops or stops > 0
            return None
        norm = math.sqrt(squares) if squares >= 0 else math.nan
        if not math.isfinite(loss + norm):
            raise DivergedError(
                f"step {number}: loss {loss}, gradient norm {norm}; a lower `training.optimizer.learningRate` or "
                "longer `warmupSteps` may help: stale weights bear less than fresh ones"
            )
        rate = learning_rate(number, self._training.steps, self._training.optimizer)
        fed = Fed(*(int(one) for one in held)) if self._micro_batches.padded else None
        return StepResult(number, loss, norm, rate, stops > 0 or self._stops, fed=fed)
