"""Rules on the worker pods: what Kubernetes would refuse later, and what the runtime sets itself."""

from __future__ import annotations

from meshwright.api.spec import ParallelTrainingJobSpec as Spec
from meshwright.api.workers import EnvVar, Toleration
from meshwright.rules.rule import Rule

RESERVED_PREFIXES = ("MESHWRIGHT_", "TORCHELASTIC_")
RESERVED_NAMES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "ROLE_RANK",
    "ROLE_WORLD_SIZE",
    "ROLE_NAME",
    "MASTER_ADDR",
    "MASTER_PORT",
)


def _well_formed(toleration: Toleration) -> bool:
    if toleration.operator == "Exists":
        return toleration.value is None
    return toleration.key is not None


def _seconds_for_no_execute(toleration: Toleration) -> bool:
    return toleration.toleration_seconds is None or toleration.effect == "NoExecute"


def _one_source(variable: EnvVar) -> bool:
    source = variable.value_from
    if source is None:
        return True
    return not variable.value and (source.secret_key_ref is None) != (source.config_map_key_ref is None)


LABEL_PREFIXES = ("meshwright.dev/", "app.kubernetes.io/")
ANNOTATION_PREFIXES = ("meshwright.dev/", "prometheus.io/")


def _none_begins(path: str, prefixes: tuple[str, ...]) -> str:
    return f"!self.{path}.exists(k, {' || '.join(f'k.startsWith({prefix!r})' for prefix in prefixes)})"


WORKERS_RULES: tuple[Rule[Spec], ...] = (
    Rule(
        "workers.labels",
        f"must not begin with {' or '.join(LABEL_PREFIXES)}: these are the operator's own, rename them",
        _none_begins("workers.labels", LABEL_PREFIXES),
        lambda spec: not any(key.startswith(LABEL_PREFIXES) for key in spec.workers.labels),
    ),
    Rule(
        "workers.annotations",
        f"must not begin with {' or '.join(ANNOTATION_PREFIXES)}: these are the operator's own, rename them",
        _none_begins("workers.annotations", ANNOTATION_PREFIXES),
        lambda spec: not any(key.startswith(ANNOTATION_PREFIXES) for key in spec.workers.annotations),
    ),
    Rule(
        "recovery.spareNodes",
        "must be 0 with `workers.schedulerName`: no node is kept free of what another scheduler places",
        "!has(self.workers.schedulerName) || self.recovery.spareNodes == 0",
        lambda spec: spec.workers.scheduler_name is None or spec.recovery.spare_nodes == 0,
    ),
    Rule(
        "workers.env",
        "must not set names that begin with MESHWRIGHT_ or TORCHELASTIC_: these are reserved, rename them",
        "!self.workers.env.exists(e, e.name.startsWith('MESHWRIGHT_') || e.name.startsWith('TORCHELASTIC_'))",
        lambda spec: not any(e.name.startswith(RESERVED_PREFIXES) for e in spec.workers.env),
    ),
    Rule(
        "workers.env",
        f"must not set {', '.join(RESERVED_NAMES)}: each rank gets its own",
        f"!self.workers.env.exists(e, e.name in [{', '.join(repr(name) for name in RESERVED_NAMES)}])",
        lambda spec: not any(e.name in RESERVED_NAMES for e in spec.workers.env),
    ),
    Rule(
        "workers.env",
        "must have a `value` or a `valueFrom`, and in `valueFrom` one of `secretKeyRef` and `configMapKeyRef`",
        "self.workers.env.all(e, !has(e.valueFrom)"
        " || (e.value == '' && has(e.valueFrom.secretKeyRef) != has(e.valueFrom.configMapKeyRef)))",
        lambda spec: all(_one_source(e) for e in spec.workers.env),
    ),
    Rule(
        "workers.tolerations",
        "must have a `key` with operator `Equal`, and no `value` with operator `Exists`",
        "self.workers.tolerations.all(t, t.operator == 'Exists' ? !has(t.value) : has(t.key))",
        lambda spec: all(_well_formed(t) for t in spec.workers.tolerations),
    ),
    Rule(
        "workers.tolerations",
        "must have `effect: NoExecute` where `tolerationSeconds` is set",
        "self.workers.tolerations.all(t, !has(t.tolerationSeconds) || (has(t.effect) && t.effect == 'NoExecute'))",
        lambda spec: all(_seconds_for_no_execute(t) for t in spec.workers.tolerations),
    ),
)
