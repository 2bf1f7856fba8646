"""Choosing what a spec leaves out: degrees, micro-batches, the pipeline's schedule, activation checkpointing.

A small search that can be explained. A tensor-parallel group talks in every layer but over NVLink; a pipeline talks
little but idles (p - 1) / (m + p - 1) of the time (PipeDream-Flush, arXiv 2006.09503). So: one stage as long as the
model fits an NVLink domain, on the fewest tensor-parallel ranks that hold it; only then more stages. That settles how
many GPUs a replica takes, `replicas` being the user's; among layouts of so many GPUs the cost model picks the fastest.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from math import gcd

from meshwright.api.parallelism import ParallelismSpec, PipelineSchedule
from meshwright.api.training import ActivationCheckpointing, TrainingSpec
from meshwright.layout import Layout
from meshwright.models.architecture import Architecture
from meshwright.planner.cluster.limits import ClusterLimits
from meshwright.planner.cost.memory import Memory
from meshwright.planner.cost_model import CostModel
from meshwright.planner.run_config import Runnable
from meshwright.planner.search.best_first import TIE_TOLERANCE
from meshwright.planner.search.degrees import divisors
from meshwright.planner.search.search_space import CANDIDATE_SCHEDULES, checkpointing_options, context_degrees, runs
from meshwright.planner.workload import TrainingJob
from meshwright.rules.context import head_exchange_ranks, heads_divide
from meshwright.rules.parallelism import MAX_WORKERS, MAX_WORLD_SIZE
from meshwright.schedules.pipeline_layout import stages_per_rank
from meshwright.schedules.registry import kind_of

MICRO_BATCHES_PER_STAGE = 4
"""Aim: with 4 micro-batches per stage a pipeline idles less than a fifth of the time."""
MAX_MICRO_BATCHES = 65536
MAX_PRICED = 16
"""Numbers of micro-batches to price for one layout; beyond, they only cost."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """Degrees that satisfy the rules, and the memory their fullest rank needs; None when no model is known."""

    layout: Layout
    micro_batches: int
    memory: Memory | None
    schedule: PipelineSchedule = PipelineSchedule.ONE_F_ONE_B
    checkpointing: ActivationCheckpointing = ActivationCheckpointing.NONE

    @property
    def needed_bytes(self) -> int:
        """Bytes of the fullest rank; 0 when not known."""
        return int(self.memory.total) if self.memory else 0


@dataclass(frozen=True)
class DegreeSearch:
    """One job's degrees on one kind of hardware."""

    architecture: Architecture
    training: TrainingSpec
    parallelism: ParallelismSpec
    replicas: int
    gpus_per_worker: int
    cluster_limits: ClusterLimits
    cost_model: CostModel | None = None
    """What tells layouts of as many GPUs apart; without it the order of preference does."""
    asked: TrainingJob | None = None
    """The job of the search that this one comes from."""
    runnable: Runnable | None = None
    """What ranks take; without it, whatever can be divided."""

    @cached_property
    def job(self) -> TrainingJob:
        """What is asked, in the cost model's terms."""
        asked = self.asked or TrainingJob.from_parts(self.architecture, self.training, self.parallelism, self.replicas)
        return asked.decided(self.parallelism.order, self.training.checkpointing)

    def best(self) -> Candidate | None:
        """The first of `ranked`; None when no GPU holds any candidate."""
        return next(iter(self.ranked()), None)

    def decided(self, chosen: Candidate) -> DegreeSearch:
        """The search with what a candidate decided beside its degrees, as if the spec had said it."""
        return self.with_savings(chosen.layout.context, chosen.checkpointing).with_schedule(chosen.schedule)

    def with_savings(self, context: int, checkpointing: ActivationCheckpointing) -> DegreeSearch:
        """The search with these savings decided."""
        parallelism = self.parallelism.model_copy(update={"context": context})
        training = self.training.model_copy(update={"activation_checkpointing": checkpointing})
        return replace(self, parallelism=parallelism, training=training, asked=self.job)

    def with_schedule(self, schedule: PipelineSchedule) -> DegreeSearch:
        """The search with the schedule decided."""
        parallelism = self.parallelism.model_copy(update={"schedule": schedule})
        return replace(self, parallelism=parallelism, asked=self.job)

    def ranked(self) -> list[Candidate]:
        """The candidates of fewest GPUs whose every rank finds a GPU that holds it, best first, one for each layout.

        The best is the first, in order of preference, that takes at most 2 % longer than the fastest; without a price
        the first in order of preference is the only one. Sequences are shared only where nothing holds without. Where
        the cluster has too few such GPUs for any candidate, the first that some GPU holds: the placement then says what
        is short.
        """
        fallback: list[Candidate] = []
        for context in context_degrees(self.architecture, self.training, self.parallelism):
            fitting_candidates: list[Candidate] = []
            for checkpointing in checkpointing_options(self.training):
                world = fitting_candidates[0].layout.world_size if fitting_candidates else None
                smallest_fitting, held_by_some_gpu = self.with_savings(context, checkpointing).smallest_fitting(world)
                fitting_candidates += smallest_fitting
                fallback = fallback or held_by_some_gpu
                if fitting_candidates and (self.cost_model is None or not self.cluster_limits.known):
                    return fitting_candidates
            if fitting_candidates:
                first: dict[Layout, Candidate] = {}
                for one in self.by_time(fitting_candidates):
                    first.setdefault(one.layout, one)
                return list(first.values())
        return fallback

    def smallest_fitting(self, world: int | None = None) -> tuple[list[Candidate], list[Candidate]]:
        """(candidates of the fewest GPUs, or of `world`, that all find room, the first that some GPU holds).

        Savings are decided.
        """
        fallback: list[Candidate] = []
        fitting_candidates: list[Candidate] = []
        for layout in self.layouts():
            if world is not None and layout.world_size != world:
                continue
            candidate = self.with_micro_batches(layout)
            if not self.cluster_limits.known:
                return [candidate], []
            gpus = self.cluster_limits.gpus_that_fit(candidate.needed_bytes)
            if gpus >= layout.world_size:
                fitting_candidates.append(candidate)
                world = layout.world_size
                if self.cost_model is None:
                    break
            if gpus and not fallback:
                fallback = [candidate]
        return fitting_candidates, fallback

    def runs(self, one: Candidate) -> bool:
        """Whether ranks would run a candidate rather than refuse it."""
        ask = self.runnable
        return ask is None or ask(one.layout, one.micro_batches, one.schedule, one.checkpointing)

    def seconds(self, candidate: Candidate) -> float:
        """Of a step; 0 without a price."""
        if self.cost_model is None:
            return 0.0
        cost_model = self.cost_model.on(self.job.decided(candidate.schedule, candidate.checkpointing))
        return cost_model.price(candidate.layout, candidate.micro_batches).seconds

    def by_time(self, candidates: list[Candidate]) -> list[Candidate]:
        """The preferred of those that are as good as the fastest, then the others by time."""
        if self.cost_model is None or len(candidates) == 1:
            return candidates
        seconds = {id(one): self.seconds(one) for one in candidates}
        limit = TIE_TOLERANCE * min(seconds.values())
        first = next(one for one in candidates if seconds[id(one)] <= limit)
        others = sorted((one for one in candidates if one is not first), key=lambda one: seconds[id(one)])
        return [first, *others]

    def candidates(self) -> Iterator[Candidate]:
        """Every layout that is allowed with the savings that stand, with its micro-batches."""
        return (self.with_micro_batches(layout) for layout in self.layouts())

    def layouts(self) -> Iterator[Layout]:
        """Every allowed combination, in order of preference: fewest stages, tensor-parallel ranks, parts of experts."""
        for pipeline in self.pipelines():
            for tensor in self.tensors():
                for expert in self.experts():
                    layout = Layout(tensor, pipeline, self.replicas, self.parallelism.context_or_default, expert)
                    if self._fits_workers(layout) and self._accepted_by_ranks(
                        layout, self.micro_batch_counts(pipeline)
                    ):
                        yield layout

    def tensors(self) -> list[int]:
        """Tensor-parallel degrees that split the model evenly and stay in an NVLink domain."""
        if self.parallelism.tensor is not None:
            return [self.parallelism.tensor]
        model = self.architecture
        common = gcd(model.heads, model.kv_heads, model.intermediate_size, model.vocab_size)
        if model.mixture is not None:
            common = gcd(common, model.mixture.intermediate_size, model.mixture.shared_intermediate_size)
        if self.parallelism.sequence:
            common = gcd(common, self.training.sequence_length)
        asked = self.parallelism
        ranks = head_exchange_ranks(asked.context_method, asked.context_or_default, asked.ulysses)
        widest = self.cluster_limits.domain_gpus or common
        gpus = self.gpus_per_worker
        fitting = [t for t in divisors(common) if t <= widest and (t % gpus == 0 or gpus % t == 0)]
        return [t for t in fitting if self._sequences_split(t) and heads_divide(model.heads, model.kv_heads, t, ranks)]

    def _sequences_split(self, tensor: int) -> bool:
        """Whether the ranks that share a row have two parts of it each."""
        context, unit = self.parallelism.context_or_default, tensor if self.parallelism.sequence else 1
        return context == 1 or self.training.sequence_length >= 2 * context * unit

    def experts(self) -> list[int]:
        """Expert-parallel degrees: divisors of the experts and of the replicas that they are spread over."""
        if self.parallelism.expert is not None:
            return [self.parallelism.expert]
        mixture = self.architecture.mixture
        return (
            divisors(gcd(mixture.experts, self.replicas * self.parallelism.context_or_default))
            if mixture is not None
            else [1]
        )

    def pipelines(self) -> list[int]:
        """Pipeline degrees that leave each stage a layer."""
        if self.parallelism.pipeline is not None:
            return [self.parallelism.pipeline]
        layers, tied = self.architecture.layers, self.architecture.tie_embeddings
        if tied and kind_of(self.parallelism.order).asynchronous:
            return [1]
        return [p for p in range(1, layers + 1) if p * stages_per_rank(self.parallelism, p) <= layers]

    def schedules(self, layout: Layout) -> list[PipelineSchedule]:
        """Schedules to try for a layout, the simplest first; the one that is given, or that a pipeline of one needs."""
        asked = self.parallelism
        if asked.schedule is not None or layout.pipeline == 1 or self.cost_model is None:
            return [asked.order]
        return [one for one in CANDIDATE_SCHEDULES if runs(one, asked, layout, self.architecture)]

    def micro_batch_counts(self, pipeline: int) -> list[int]:
        """Numbers of micro-batches to try: with one stage the fewest first, else enough to keep the stages busy.

        Empty when the schedule can be made for none.
        """
        batch = self.training.global_batch_size // self.replicas
        requested_count = self.parallelism.micro_batches
        requested_counts = divisors(batch) if requested_count is None else [requested_count]
        schedule = kind_of(self.parallelism.order)
        possible = [m for m in requested_counts if m <= MAX_MICRO_BATCHES and schedule.accepts(pipeline, m)]
        if pipeline == 1:
            return possible
        return [m for m in possible if m >= MICRO_BATCHES_PER_STAGE * pipeline] or possible[-1:]

    def with_micro_batches(self, layout: Layout) -> Candidate:
        """The layout with the first number of micro-batches that fits, or with the best, and with its schedule.

        Where none fits, with the last number, which needs least.
        """
        counts = self.micro_batch_counts(layout.pipeline)
        smallest_footprint = self._candidate(layout, counts[-1])
        if not self.cluster_limits.known:
            return self._candidate(layout, counts[0])
        if self.cluster_limits.gpus_that_fit(smallest_footprint.needed_bytes) == 0:
            return smallest_footprint
        affordable = [
            one
            for schedule in self.schedules(layout)
            for one in islice(self.with_schedule(schedule).fitting_counts(layout), MAX_PRICED if self.cost_model else 1)
        ]
        return self.by_time(affordable)[0] if affordable else smallest_footprint

    def fitting_counts(self, layout: Layout) -> Iterator[Candidate]:
        """The layout with each number of micro-batches for which enough GPUs hold it, the schedule being decided."""
        counts = self.micro_batch_counts(layout.pipeline)
        if not self._accepted_by_ranks(layout, counts):
            return
        for count in counts:
            candidate = self._candidate(layout, count)
            if self.cluster_limits.gpus_that_fit(candidate.needed_bytes) >= layout.world_size:
                yield candidate

    def _candidate(self, layout: Layout, micro_batches: int) -> Candidate:
        memory = self.job.memory(layout, micro_batches)
        return Candidate(layout, micro_batches, memory, self.parallelism.order, self.training.checkpointing)

    def _accepted_by_ranks(self, layout: Layout, counts: list[int]) -> bool:
        """Whether ranks take the layout: what they refuse, they refuse with every number that the schedule takes."""
        order, again = self.parallelism.order, self.training.checkpointing
        return bool(counts) and self.runs(Candidate(layout, counts[0], None, order, again))

    def _fits_workers(self, layout: Layout) -> bool:
        workers, rest = divmod(layout.world_size, self.gpus_per_worker)
        return rest == 0 and workers <= MAX_WORKERS and layout.world_size <= MAX_WORLD_SIZE
