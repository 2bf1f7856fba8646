"""Asks the rule book (`meshwright/rules`) whether Meshwright's runtime runs a candidate of a search.

A candidate is checked as the spec that it would become. `parallelism_of` and `training_of` make the parts of that spec,
so the API's fields bound every number, and `apply_strategy` writes what was checked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from operator import attrgetter

from pydantic import ValidationError

from meshwright.api.parallelism import (
    ASSUMED_CONTEXT_METHOD,
    ContextMethod,
    ParallelismSpec,
    PipelineSchedule,
)
from meshwright.api.spec import RuntimeSpec
from meshwright.api.training import ActivationCheckpointing, OptimizerOffload, TrainingSpec
from meshwright.layout import Layout
from meshwright.planner.cost.strategy import Strategy, Workload
from meshwright.planner.run_config import techniques_of
from meshwright.planner.workload import TrainingJob
from meshwright.rules.data_parallel import possible_zero_stages
from meshwright.rules.facts import Facts, ResolvedFacts
from meshwright.rules.rule import Rule
from meshwright.rules.validation import is_allowed, rules_on

AllowsStrategy = Callable[[Workload, Strategy], bool]
"""Whether a runtime runs a strategy."""

_TRAINING_FIELDS = ("training.activationCheckpointing", "training.optimizer")
_LAYOUT_FIELDS = (
    "replicas",
    *(
        f"parallelism.{field}"
        for field in (
            *("tensor", "pipeline", "context", "expert", "sequence", "expertTensor", "tensorOverlap"),
            *("contextMethod", "ulysses", "schedule", "virtualStages", "layerSplit", "microBatches", "zeroStage"),
        )
    ),
)
"""With `_TRAINING_FIELDS`, the fields in which the candidates of a search differ. Admission has checked the others."""
_layout_fields = attrgetter(
    *("tensor", "pipeline", "data", "context", "expert", "sequence_parallel", "expert_tensor", "tensor_overlap"),
    *("context_method", "ulysses", "schedule", "virtual_stages", "layer_split", "micro_batches", "zero_stage"),
)
_MAX_CACHED_LAYOUTS = 32768
_RUNTIME = RuntimeSpec()
_UNKNOWN = ResolvedFacts(0, ParallelismSpec(), None, None, None, runtime=_RUNTIME)
"""In a cache, that there is no entry."""
_OPEN_FACTS = ResolvedFacts(1, ParallelismSpec(), None, None, None, runtime=_RUNTIME)


@cache
def _rules_that_read(*fields: str) -> tuple[Rule[Facts], ...]:
    return rules_on(_OPEN_FACTS, fields)


def largest_value(field: str) -> int:
    """The largest value that the API allows for a field of `parallelism`, by its name on the wire."""
    options = ParallelismSpec.model_json_schema()["properties"][field]["anyOf"]
    return int(next(option["maximum"] for option in options if "maximum" in option))


def parallelism_of(strategy: Strategy, stated: ParallelismSpec) -> ParallelismSpec:
    """Return `spec.parallelism` of a strategy; `stated` has what a search does not change.

    Raises:
        ValidationError: the API does not allow a number of the strategy.
    """
    has_pipeline, kind = strategy.pipeline > 1, strategy.schedule_kind
    has_context = strategy.context > 1
    return ParallelismSpec(
        tensor=strategy.tensor,
        pipeline=strategy.pipeline,
        expert=strategy.expert,
        sequence=strategy.sequence_parallel if strategy.tensor > 1 else stated.sequence,
        expert_tensor=strategy.expert_tensor,
        tensor_overlap=stated.tensor_overlap and strategy.tensor > 1 and strategy.sequence_parallel,
        context=strategy.context,
        context_method=strategy.context_method if has_context else ASSUMED_CONTEXT_METHOD,
        ulysses=strategy.ulysses if has_context and strategy.context_method is ContextMethod.RING_ULYSSES else None,
        schedule=strategy.schedule if has_pipeline else None,
        virtual_stages=strategy.virtual_stages if has_pipeline and kind.virtual_stages else None,
        layer_split=list(strategy.layer_split) if strategy.layer_split is not None else None,
        micro_batches=strategy.micro_batches,
        zero_stage=strategy.zero_stage,
    )


def training_of(
    training: TrainingSpec, checkpointing: ActivationCheckpointing, offload: OptimizerOffload
) -> TrainingSpec:
    """Return `spec.training` with the checkpointing and the offload of a strategy."""
    optimizer = training.optimizer
    if offload is OptimizerOffload.CPU:
        optimizer = optimizer.model_copy(update={"offload": OptimizerOffload.CPU, "offload_path": None})
    return training.model_copy(update={"activation_checkpointing": checkpointing, "optimizer": optimizer})


def resolved_parallelism(strategy: Strategy, stated: ParallelismSpec) -> ParallelismSpec:
    """Return the job's `spec.parallelism` with every field that it leaves open as in a strategy."""
    return stated.model_copy(
        update={
            "tensor": strategy.tensor,
            "pipeline": strategy.pipeline,
            "expert": strategy.expert,
            "context": strategy.context,
            "schedule": strategy.schedule if strategy.pipeline > 1 else stated.order,
            "micro_batches": strategy.micro_batches,
            **techniques_of(stated, strategy),
        }
    )


def rules_of_worker(stated: ParallelismSpec | None = None, training: TrainingSpec | None = None) -> AllowsStrategy:
    """Return the check whether Meshwright's runtime runs a strategy, as `parallelism_of` writes it.

    Args:
        stated: the job's `spec.parallelism`; the API's defaults if there is no job.
        training: the job's `spec.training`. Without it, rules about training are not checked.
    """
    parallelism = stated or ParallelismSpec()
    return _rules_on(lambda strategy: parallelism_of(strategy, parallelism), training)


def rules_of_job(job: TrainingJob) -> AllowsStrategy:
    """Return the check whether Meshwright's runtime runs a job with a strategy for all that the job leaves open."""
    return _rules_on(lambda strategy: resolved_parallelism(strategy, job.parallelism), job.training)


def _rules_on(as_spec: Callable[[Strategy], ParallelismSpec], training: TrainingSpec | None) -> AllowsStrategy:
    layout_rules = _rules_that_read(*_LAYOUT_FIELDS)
    training_rules = _rules_that_read(*_TRAINING_FIELDS) if training is not None else ()
    facts_of_layouts: dict[object, ResolvedFacts | None] = {}

    @cache
    def training_with(checkpointing: ActivationCheckpointing, offload: OptimizerOffload) -> TrainingSpec | None:
        return training_of(training, checkpointing, offload) if training is not None else None

    def facts_of(work: Workload, strategy: Strategy) -> ResolvedFacts | None:
        """The facts without recomputation and offload; None if a rule or a bound of the API rejects them."""
        try:
            chosen = as_spec(strategy)
        except ValidationError:
            return None
        plain = training_with(ActivationCheckpointing.NONE, OptimizerOffload.NONE)
        facts = ResolvedFacts(strategy.data, chosen, work.model, None, plain, runtime=_RUNTIME)
        return facts if is_allowed(facts, layout_rules) else None

    def allows(work: Workload, strategy: Strategy) -> bool:
        # A search asks about each layout once for each way to save memory, and most rules do not read those.
        key = (work, _layout_fields(strategy))
        facts = facts_of_layouts.get(key, _UNKNOWN)
        if facts is _UNKNOWN:
            if len(facts_of_layouts) >= _MAX_CACHED_LAYOUTS:
                facts_of_layouts.clear()
            facts = facts_of_layouts[key] = facts_of(work, strategy)
        if facts is None or training is None:
            return facts is not None
        chosen = training_with(strategy.checkpointing, strategy.optimizer_offload)
        return is_allowed(replace(facts, training=chosen), training_rules)

    return allows


def allowed_schedules(
    job: TrainingJob, layout: Layout, schedules: Iterable[PipelineSchedule]
) -> list[PipelineSchedule]:
    """Return the schedules that break no rule which the job's layout keeps with the schedule assumed by default."""
    stated = ResolvedFacts(layout.data, job.parallelism, job.architecture, None, job.training, runtime=_RUNTIME)
    degrees = {name: getattr(layout, name) for name in ("tensor", "pipeline", "context", "expert")}
    facts = _with(stated, **degrees)
    rules = [rule for rule in _rules_that_read("parallelism.schedule") if rule.holds(facts)]
    return [schedule for schedule in schedules if is_allowed(_with(facts, schedule=schedule), rules)]


def allowed_stages_of(
    job: TrainingJob, layout: Layout, schedule: PipelineSchedule, stages: Sequence[int]
) -> Sequence[int]:
    """Return the ZeRO stages that the job allows in a layout. All of its strategy if a rule rejects each of them."""
    return _allowed_stages_of(_SameJob(job), layout, schedule, tuple(stages))


@dataclass(frozen=True, slots=True, eq=False)
class _SameJob:
    """A job as a key: it equals itself only, since to compare or hash what it contains takes longer than a rule."""

    job: TrainingJob

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _SameJob) and other.job is self.job

    def __hash__(self) -> int:
        return id(self.job)


@lru_cache(maxsize=4096)
def _allowed_stages_of(
    same: _SameJob, layout: Layout, schedule: PipelineSchedule, stages: tuple[int, ...]
) -> tuple[int, ...]:
    # A search asks fifteen times about the same layout and schedule.
    job = same.job
    stated = ResolvedFacts(layout.data, job.parallelism, job.architecture, None, job.training, runtime=_RUNTIME)
    degrees = {name: getattr(layout, name) for name in ("tensor", "pipeline", "context", "expert")}
    facts, rules = _with(stated, **degrees, schedule=schedule), _rules_that_read("parallelism.zeroStage")
    allowed = tuple(stage for stage in stages if is_allowed(_with(facts, zero_stage=stage), rules))
    return allowed or possible_zero_stages(stated)


def allowed_zero_stages(job: TrainingJob, stages: Iterable[int]) -> tuple[int, ...]:
    """Return the ZeRO stages that the job's training allows if parameters are sharded over several ranks."""
    facts, rules = _free_facts(job), _rules_that_read("parallelism.zeroStage")
    return tuple(stage for stage in stages if is_allowed(_with(facts, zero_stage=stage), rules))


def allowed_offload(job: TrainingJob, options: Iterable[OptimizerOffload]) -> tuple[OptimizerOffload, ...]:
    """Return the ways to offload the optimizer that the job's training allows."""
    facts, rules = _free_facts(job), _rules_that_read("training.optimizer")
    checkpointing = job.training.checkpointing
    return tuple(
        option
        for option in options
        if is_allowed(replace(facts, training=training_of(job.training, checkpointing, option)), rules)
    )


def allows_split_experts(job: TrainingJob) -> bool:
    """Whether the job's training allows to spread the experts of a mixture over ranks. False without a mixture."""
    mixture, facts = job.architecture.mixture, _free_facts(job)
    if mixture is None:
        return False
    facts = replace(facts, replicas=facts.replicas * mixture.experts)
    rules = [rule for rule in _rules_that_read("parallelism.expert") if rule.holds(_with(facts, expert=1))]
    return is_allowed(_with(facts, expert=mixture.experts), rules)


def allows_shared_sequences(job: TrainingJob, stated: ParallelismSpec) -> bool:
    """Whether the job allows ranks to share a sequence, with the other fields of `parallelism` as stated."""
    facts = replace(_free_facts(job), parallelism=stated)
    rules = [rule for rule in _rules_that_read("parallelism.context") if rule.holds(_with(facts, context=1))]
    return is_allowed(_with(facts, context=2 * (stated.ulysses or 1)), rules)


def _free_facts(job: TrainingJob) -> ResolvedFacts:
    """The facts of a job whose degrees are open, with two replicas on each island."""
    replicas = 2 * job.fixed.settings.islands
    return ResolvedFacts(replicas, ParallelismSpec(), job.architecture, None, job.training, runtime=_RUNTIME)


def _with(facts: ResolvedFacts, **fields: object) -> ResolvedFacts:
    return replace(facts, parallelism=facts.parallelism.model_copy(update=fields))
