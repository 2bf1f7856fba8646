"""The rule book: every rule once, and the checks of admission, planner and ranks.

- The CRD contains the CEL of `SPEC_RULES` (`x-kubernetes-validations` of `spec`). `check_spec` checks the same
  conditions in Python, for objects that did not pass admission. A test compares the two languages on the same specs.
- `FACT_RULES` are the rules on what ranks run. `run_problems` checks a resolved run with them: the planner before pods
  exist, and each rank before any process group is created, because a mismatch inside a collective would hang all ranks.
  Rules without CEL are checked only there.
- A search checks candidates: `is_allowed(facts)` stops at the first broken rule, `broken_rules(facts)` returns all of
  them. `facts` is a spec, or `ResolvedFacts(replicas, parallelism, model, data, training, ...)` with the degrees of the
  candidate in `parallelism`, where None is open. If many candidates differ in only a few fields,
  `rules_on(facts, fields)` returns the rules that read one of these, for `is_allowed(candidate, rules)`.

A degree that is left out is chosen later, and rules about it hold until then. With `runtime.command` there is no
planner, and such a degree is 1. Messages name the field and the fix. Nothing here imports torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from meshwright.api.model import ModelSpec
from meshwright.api.spec import ParallelTrainingJobSpec
from meshwright.models.architecture import Architecture
from meshwright.protocol.run_config import NativeRun
from meshwright.rules.checkpoint import CHECKPOINT_RULES
from meshwright.rules.context import CONTEXT_RULES
from meshwright.rules.data import DATA_RULES
from meshwright.rules.data_parallel import REPLICA_RULES
from meshwright.rules.early_update import EARLY_UPDATE_RULES
from meshwright.rules.edits import IMMUTABLE
from meshwright.rules.elastic import ELASTIC_RULES
from meshwright.rules.facts import Facts, facts_of_run
from meshwright.rules.gpus import GPUS_RULES
from meshwright.rules.mixture import MIXTURE_RULES
from meshwright.rules.model import MODEL_FORM_RULES, MODEL_RULES
from meshwright.rules.nearest import advice, sentence
from meshwright.rules.parallelism import PARALLELISM_RULES
from meshwright.rules.pipeline import PIPELINE_RULES
from meshwright.rules.preemption import PREEMPTION_RULES
from meshwright.rules.preflight import PREFLIGHT_RULES
from meshwright.rules.rule import Rule
from meshwright.rules.runtime import RUNTIME_RULES
from meshwright.rules.sharded_masters import MASTER_RULES
from meshwright.rules.training import TRAINING_RULES
from meshwright.rules.workers import WORKERS_RULES

FACT_RULES: tuple[Rule[Facts], ...] = (
    *MODEL_RULES,
    *PARALLELISM_RULES,
    *CONTEXT_RULES,
    *REPLICA_RULES,
    *MASTER_RULES,
    *MIXTURE_RULES,
    *PIPELINE_RULES,
    *TRAINING_RULES,
    *EARLY_UPDATE_RULES,
    *DATA_RULES,
)
"""Rules on what ranks run, for a spec and for a resolved run."""

SPEC_RULES: tuple[Rule[ParallelTrainingJobSpec], ...] = (
    *RUNTIME_RULES,
    *CHECKPOINT_RULES,
    *MODEL_FORM_RULES,
    *GPUS_RULES,
    *(rule for rule in FACT_RULES if rule.condition is not None),
    *WORKERS_RULES,
    *ELASTIC_RULES,
    *PREEMPTION_RULES,
    *PREFLIGHT_RULES,
)
"""Every rule of a spec: also those on what a run does not have, such as worker pods."""

_READ = re.compile(r"self\.(replicas|[a-z]\w*\.\w+)")


@dataclass(frozen=True, slots=True)
class Problem:
    """A rule that a spec breaks."""

    field: str
    """Path below `spec`, such as `parallelism.tensor`."""
    message: str
    """What must hold, why, and the fix."""


def check_spec(spec: ParallelTrainingJobSpec) -> list[Problem]:
    """Every rule that `spec` breaks, in the order of the table. Empty if the spec is valid."""
    return [Problem(rule.field, rule.message) for rule in SPEC_RULES if not rule.holds(spec)]


def explained_problems(spec: ParallelTrainingJobSpec) -> list[Problem]:
    """The same as `check_spec`. Messages also have the values of the fields, and the nearest values that work."""
    return [Problem(rule.field, advice(rule, spec, SPEC_RULES)) for rule in SPEC_RULES if not rule.holds(spec)]


def with_model_numbers(spec: ParallelTrainingJobSpec, architecture: Architecture) -> ParallelTrainingJobSpec:
    """The spec with the numbers of its model as fields, so that rules check those of a preset like written ones."""
    numbers = architecture.model_dump(include=set(ModelSpec.model_fields), exclude={"rope_theta", "window_rope_theta"})
    return spec.model_copy(update={"model": ModelSpec(**numbers)})


def check_edit(running: ParallelTrainingJobSpec, wanted: ParallelTrainingJobSpec) -> list[Problem]:
    """What an edit of a job that has finished a step must not change, but does. Empty if it is allowed."""
    return [Problem(field.field, field.message) for field in IMMUTABLE if not field.holds(running, wanted)]


def run_problems(run: NativeRun) -> list[str]:
    """Why ranks would reject a run: each message names the field, its value and the nearest values that work.

    Empty if they would accept it. Files and devices are not checked here.
    """
    return list(_sentences(_ByNumbers(run.model_dump_json(), run))) if broken_rules(facts_of_run(run)) else []


@dataclass(frozen=True, slots=True)
class _ByNumbers:
    """A run that equals another one with the same numbers."""

    numbers: str
    run: NativeRun = field(compare=False)


@lru_cache(maxsize=256)
def _sentences(one: _ByNumbers) -> tuple[str, ...]:
    """What the broken rules say: remembered, because to look for the nearest values takes up to a third of a second,
    and an edit that cannot be applied is checked in every reconcile of its job.
    """
    facts = facts_of_run(one.run)
    return tuple(sentence(rule, facts, FACT_RULES) for rule in broken_rules(facts))


def broken_rules(facts: Facts) -> list[Rule[Facts]]:
    """The rules that these facts break, in the order of the table. A rule whose facts are open holds."""
    return [rule for rule in FACT_RULES if not rule.holds(facts)]


def is_allowed(facts: Facts, rules: Iterable[Rule[Facts]] = FACT_RULES) -> bool:
    """Whether these facts break none of the rules."""
    return all(rule.holds(facts) for rule in rules)


def rules_on(facts: Facts, fields: Sequence[str]) -> tuple[Rule[Facts], ...]:
    """The rules to check for candidates that differ from `facts` only in these fields, for `is_allowed`.

    Args:
        facts: the facts that all candidates share.
        fields: `replicas`, or a part and a field of it on the wire, such as `parallelism.tensor`.
    """
    changed = set(fields)
    return tuple(
        rule
        for rule in FACT_RULES
        if rule.condition is None or not rule.holds(facts) or changed & set(_READ.findall(rule.cel))
    )
