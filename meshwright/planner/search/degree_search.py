"""Choosing what a spec leaves out: degrees, micro-batches, the pipeline's schedule, activation checkpointing.

A small search that can be explained. A tensor-parallel group talks in every layer but over NVLink; a pipeline talks
little but idles (p - 1) / (m + p - 1) of the time (PipeDream-Flush, arXiv 2006.09503). So: one stage as long as the
model fits an NVLink domain, on the fewest tensor-parallel ranks that hold it; only then more stages. That settles how
many GPUs a replica takes, `replicas` being the user's; among layouts of so many GPUs the cost model picks the fastest.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from math import gcd

from meshwright.api.parallelism import PipelineSchedule
from meshwright.api.training import ActivationCheckpointing
from meshwright.layout import Layout
from meshwright.planner.cluster.limits import ClusterLimits
from meshwright.planner.cost.memory import Memory
from meshwright.planner.cost.strategy import Strategy
from meshwright.planner.cost_model import CostModel
from meshwright.planner.run_config import Runnable
from meshwright.planner.search.best_first import TIE_TOLERANCE
from meshwright.planner.search.request import MAX_MICRO_BATCHES
from meshwright.planner.search.search_space import (
    CANDIDATE_SCHEDULES,
    checkpointing_options,
    context_degrees_of_job,
    divisors,
    schedule_allowed,
)
from meshwright.planner.workload import TrainingJob
from meshwright.rules.context import head_exchange_ranks, heads_divide
from meshwright.rules.parallelism import MAX_WORKERS, MAX_WORLD_SIZE
from meshwright.schedules.pipeline_layout import stages_per_rank
from meshwright.schedules.registry import kind_of

MICRO_BATCHES_PER_STAGE = 4
"""Aim: with 4 micro-batches per stage a pipeline idles less than a fifth of the time."""
MAX_PRICED = 16
"""Numbers of micro-batches to price for one layout; beyond, they only cost."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A strategy that satisfies the rules, and the memory that its fullest rank needs; None when no model is known."""

    strategy: Strategy
    memory: Memory | None

    @property
    def needed_bytes(self) -> int:
        """Bytes of the fullest rank; 0 when not known."""
        return int(self.memory.total) if self.memory else 0


@dataclass(frozen=True, slots=True)
class DegreeSearch:
    """One job's degrees on one kind of hardware."""

    job: TrainingJob
    replicas: int
    gpus_per_worker: int
    cluster_limits: ClusterLimits
    cost_model: CostModel | None = None
    """What tells layouts of as many GPUs apart; without it the order of preference does."""
    runnable: Runnable | None = None
    """What ranks take; without it, whatever can be divided."""

    def best(self) -> Candidate | None:
        """The first of `ranked`; None when no GPU holds any candidate."""
        return next(iter(self.ranked()), None)

    def ranked(self) -> list[Candidate]:
        """The candidates of fewest GPUs whose every rank finds a GPU that holds it, best first, one for each layout.

        The best is the first, in order of preference, that takes at most 2 % longer than the fastest; without a price
        the first in order of preference is the only one. Sequences are shared only where nothing holds without. Where
        the cluster has too few such GPUs for any candidate, the first that some GPU holds: the placement then says what
        is short.
        """
        fallback: list[Candidate] = []
        for context in context_degrees_of_job(self.job):
            fitting_candidates: list[Candidate] = []
            for checkpointing in checkpointing_options(self.job.training):
                world = fitting_candidates[0].strategy.world_size if fitting_candidates else None
                smallest_fitting, held_by_some_gpu = self.smallest_fitting(context, checkpointing, world)
                fitting_candidates += smallest_fitting
                fallback = fallback or held_by_some_gpu
                if fitting_candidates and (self.cost_model is None or not self.cluster_limits.known):
                    return fitting_candidates
            if fitting_candidates:
                first: dict[Layout, Candidate] = {}
                for one in self.by_time(fitting_candidates):
                    first.setdefault(one.strategy.layout, one)
                return list(first.values())
        return fallback

    def smallest_fitting(
        self, context: int, checkpointing: ActivationCheckpointing, world: int | None = None
    ) -> tuple[list[Candidate], list[Candidate]]:
        """(candidates of the fewest GPUs, or of `world`, that all find room, the first that some GPU holds)."""
        fallback: list[Candidate] = []
        fitting_candidates: list[Candidate] = []
        for layout in self.layouts(context, checkpointing):
            if world is not None and layout.world_size != world:
                continue
            candidate = self.with_micro_batches(layout, checkpointing)
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
        return self.runnable is None or self.runnable(one.strategy)

    def seconds(self, strategy: Strategy) -> float:
        """Of a step; 0 without a price."""
        return self.cost_model.price(strategy).seconds if self.cost_model is not None else 0.0

    def by_time(self, candidates: list[Candidate]) -> list[Candidate]:
        """The preferred of those that are as good as the fastest, then the others by time."""
        if self.cost_model is None or len(candidates) == 1:
            return candidates
        seconds = {id(one): self.seconds(one.strategy) for one in candidates}
        limit = TIE_TOLERANCE * min(seconds.values())
        first = next(one for one in candidates if seconds[id(one)] <= limit)
        others = sorted((one for one in candidates if one is not first), key=lambda one: seconds[id(one)])
        return [first, *others]

    def candidates(self, context: int, checkpointing: ActivationCheckpointing) -> Iterator[Candidate]:
        """Every layout that is allowed with these savings, with its micro-batches."""
        return (self.with_micro_batches(layout, checkpointing) for layout in self.layouts(context, checkpointing))

    def layouts(self, context: int, checkpointing: ActivationCheckpointing) -> Iterator[Layout]:
        """Every allowed combination, in order of preference: fewest stages, tensor-parallel ranks, parts of experts."""
        order = self.job.parallelism.order
        for pipeline in self.pipelines():
            counts = self.micro_batch_counts(pipeline, order)
            for tensor in self.tensors(context):
                for expert in self.experts(context):
                    layout = Layout(tensor, pipeline, self.replicas, context, expert)
                    fills = self._fits_workers(layout)
                    if fills and self._accepted_by_ranks(layout, counts, order, checkpointing):
                        yield layout

    def tensors(self, context: int) -> list[int]:
        """Tensor-parallel degrees that split the model evenly and stay in an NVLink domain."""
        asked, model = self.job.parallelism, self.job.architecture
        if asked.tensor is not None:
            return [asked.tensor]
        common = gcd(model.heads, model.kv_heads, model.intermediate_size, model.vocab_size)
        if model.mixture is not None:
            common = gcd(common, model.mixture.intermediate_size, model.mixture.shared_intermediate_size)
        if asked.sequence:
            common = gcd(common, self.job.work.sequence_length)
        ranks = head_exchange_ranks(asked.context_method, context, asked.ulysses)
        widest = self.cluster_limits.domain_gpus or common
        gpus = self.gpus_per_worker
        fitting = [t for t in divisors(common) if t <= widest and (t % gpus == 0 or gpus % t == 0)]
        return [
            t
            for t in fitting
            if self._sequences_split(t, context) and heads_divide(model.heads, model.kv_heads, t, ranks)
        ]

    def _sequences_split(self, tensor: int, context: int) -> bool:
        """Whether the ranks that share a row have two parts of it each."""
        unit = tensor if self.job.parallelism.sequence else 1
        return context == 1 or self.job.work.sequence_length >= 2 * context * unit

    def experts(self, context: int) -> list[int]:
        """Expert-parallel degrees: divisors of the experts and of the replicas that they are spread over."""
        if self.job.parallelism.expert is not None:
            return [self.job.parallelism.expert]
        mixture = self.job.architecture.mixture
        return divisors(gcd(mixture.experts, self.replicas * context)) if mixture is not None else [1]

    def pipelines(self) -> list[int]:
        """Pipeline degrees that leave each stage a layer."""
        asked, model = self.job.parallelism, self.job.architecture
        if asked.pipeline is not None:
            return [asked.pipeline]
        if model.tie_embeddings and kind_of(asked.order).asynchronous:
            return [1]
        return [p for p in range(1, model.layers + 1) if p * stages_per_rank(asked, p) <= model.layers]

    def schedules(self, layout: Layout) -> list[PipelineSchedule]:
        """Schedules to try for a layout, the simplest first; the one that is given, or that a pipeline of one needs."""
        asked = self.job.parallelism
        if asked.schedule is not None or layout.pipeline == 1 or self.cost_model is None:
            return [asked.order]
        return [one for one in CANDIDATE_SCHEDULES if schedule_allowed(one, asked, layout, self.job.architecture)]

    def micro_batch_counts(self, pipeline: int, schedule: PipelineSchedule) -> list[int]:
        """Numbers of micro-batches to try: with one stage the fewest first, else enough to keep the stages busy.

        Empty when the schedule can be made for none.
        """
        batch = self.job.work.global_batch // self.replicas
        requested_count = self.job.parallelism.micro_batches
        requested_counts = divisors(batch) if requested_count is None else [requested_count]
        accepts = kind_of(schedule).accepts
        possible = [m for m in requested_counts if m <= MAX_MICRO_BATCHES and accepts(pipeline, m)]
        if pipeline == 1:
            return possible
        return [m for m in possible if m >= MICRO_BATCHES_PER_STAGE * pipeline] or possible[-1:]

    def with_micro_batches(
        self, layout: Layout, checkpointing: ActivationCheckpointing, schedule: PipelineSchedule | None = None
    ) -> Candidate:
        """The layout with the first number of micro-batches that fits, or with the best, and with its schedule.

        Where none fits, with the last number, which needs least. `schedule` is the only one to try, where it is given.
        """
        order = schedule or self.job.parallelism.order
        counts = self.micro_batch_counts(layout.pipeline, order)
        smallest_footprint = self.candidate(layout, counts[-1], order, checkpointing)
        if not self.cluster_limits.known:
            return self.candidate(layout, counts[0], order, checkpointing)
        if self.cluster_limits.gpus_that_fit(smallest_footprint.needed_bytes) == 0:
            return smallest_footprint
        affordable = [
            one
            for each in ([schedule] if schedule else self.schedules(layout))
            for one in islice(self.fitting_counts(layout, each, checkpointing), MAX_PRICED if self.cost_model else 1)
        ]
        return self.by_time(affordable)[0] if affordable else smallest_footprint

    def fitting_counts(
        self, layout: Layout, schedule: PipelineSchedule, checkpointing: ActivationCheckpointing
    ) -> Iterator[Candidate]:
        """The layout with each number of micro-batches for which enough GPUs hold it."""
        counts = self.micro_batch_counts(layout.pipeline, schedule)
        if not self._accepted_by_ranks(layout, counts, schedule, checkpointing):
            return
        for count in counts:
            candidate = self.candidate(layout, count, schedule, checkpointing)
            if self.cluster_limits.gpus_that_fit(candidate.needed_bytes) >= layout.world_size:
                yield candidate

    def candidate(
        self, layout: Layout, micro_batches: int, schedule: PipelineSchedule, checkpointing: ActivationCheckpointing
    ) -> Candidate:
        """A strategy with its memory.

        Raises:
            ValueError: there are more stages than layers.
        """
        strategy = self.job.strategy(layout, micro_batches, schedule, checkpointing)
        return Candidate(strategy, self.job.memory(strategy))

    def _accepted_by_ranks(
        self, layout: Layout, counts: list[int], schedule: PipelineSchedule, checkpointing: ActivationCheckpointing
    ) -> bool:
        """Whether ranks take the layout: what they refuse, they refuse with every number that the schedule takes."""
        if not counts or self.runnable is None:
            return bool(counts)
        try:
            return self.runnable(self.job.strategy(layout, counts[0], schedule, checkpointing))
        except ValueError:
            return False  # stages without layers

    def _fits_workers(self, layout: Layout) -> bool:
        workers, rest = divmod(layout.world_size, self.gpus_per_worker)
        return rest == 0 and workers <= MAX_WORKERS and layout.world_size <= MAX_WORLD_SIZE
