"""Rules on `gpus`, the budget for which the planner chooses the number of replicas."""

from __future__ import annotations

from meshwright.api.spec import ParallelTrainingJobSpec as Spec
from meshwright.rules.parallelism import LEAST_WORLD_SIZE, least_world_size
from meshwright.rules.rule import Rule

_NO_GPUS_OR = "!has(self.gpus) || "


def _no_outer(spec: Spec) -> bool:
    return spec.gpus is None or spec.training is None or spec.training.outer is None


GPUS_RULES: tuple[Rule[Spec], ...] = (
    Rule(
        "replicas",
        "must be 1, its default, with `gpus`, because the planner chooses the replicas for these GPUs: remove one of "
        "the two",
        f"{_NO_GPUS_OR}self.replicas == 1",
        lambda spec: spec.gpus is None or spec.replicas == 1,
    ),
    Rule(
        "gpus",
        "is not supported with `training.outer`, whose islands are replicas that you choose: use `replicas` instead",
        f"{_NO_GPUS_OR}!has(self.training) || !has(self.training.outer)",
        _no_outer,
    ),
    Rule(
        "gpus",
        "must be at least `workers.gpusPerWorker`, because a worker is never split: change one of them",
        f"{_NO_GPUS_OR}self.gpus >= self.workers.gpusPerWorker",
        lambda spec: spec.gpus is None or spec.gpus >= spec.workers.gpus_per_worker,
    ),
    Rule(
        "gpus",
        "must be at least `parallelism.tensor` times `pipeline` and `context`, the GPUs of one replica: raise it, or "
        "leave a degree to the planner",
        f"{_NO_GPUS_OR}self.gpus >= {LEAST_WORLD_SIZE}",
        lambda spec: spec.gpus is None or spec.gpus >= least_world_size(spec),
    ),
)
