"""What a spec must hold beyond its schema: each rule once in CEL, for the API server, and once in Python, beside it.

The CRD carries the CEL (`x-kubernetes-validations` of `spec`), `meshwright.rules.validation` runs the Python; a test
feeds both the same specs. A degree that is left out is chosen later, so a rule about it holds until then; with
`runtime.command` no planner chooses and such a degree is 1. Messages name the field and the fix.
"""

from __future__ import annotations

from meshwright.rules.context import CONTEXT_RULES
from meshwright.rules.data import DATA_RULES
from meshwright.rules.data_parallel import REPLICA_RULES
from meshwright.rules.memory import MEMORY_RULES
from meshwright.rules.mixture import MIXTURE_RULES
from meshwright.rules.model import MODEL_RULES
from meshwright.rules.parallelism import PARALLELISM_RULES
from meshwright.rules.pipeline import PIPELINE_RULES
from meshwright.rules.recovery import POLICY_RULES
from meshwright.rules.rule import Rule
from meshwright.rules.runtime import RUNTIME_RULES
from meshwright.rules.training import TRAINING_RULES
from meshwright.rules.transition import TRANSITIONS, Transition
from meshwright.rules.volumes import VOLUMES_RULES
from meshwright.rules.workers import WORKERS_RULES

__all__ = ["SPEC_RULES", "TRANSITIONS", "Rule", "Transition"]

SPEC_RULES: tuple[Rule, ...] = (
    *RUNTIME_RULES,
    *MODEL_RULES,
    *PARALLELISM_RULES,
    *CONTEXT_RULES,
    *REPLICA_RULES,
    *MIXTURE_RULES,
    *PIPELINE_RULES,
    *TRAINING_RULES,
    *MEMORY_RULES,
    *DATA_RULES,
    *WORKERS_RULES,
    *VOLUMES_RULES,
    *POLICY_RULES,
)
