"""The field of the spec that a pod's problem comes from, so that a message can say what to correct."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from meshwright.api.spec import ParallelTrainingJobSpec
from meshwright.rules.runtime import AGENT_VOLUME
from meshwright_operator.decide.missing_claims import claims_of
from meshwright_operator.kube.pod_info import INIT_CONTAINER

PROBLEM_AFTER_SECONDS = 60.0
"""Age of a pod at which its problem is reported: most problems resolve by themselves."""
SPEC_PROBLEM_AFTER_SECONDS = 10.0
"""The same for problems that mostly come from a name in the spec."""
SPEC_PROBLEMS = frozenset(
    {
        *("InvalidImageName", "ErrImageNeverPull", "ErrImagePull", "ImagePullBackOff"),
        *("CreateContainerConfigError", "CreateContainerError", "RunContainerError"),
        *("FailedMount", "FailedAttachVolume"),
    }
)

_IMAGE = frozenset({"InvalidImageName", "ErrImageNeverPull", "ErrImagePull", "ImagePullBackOff"})
_NAMED = re.compile(r"(secret|configmap|persistentvolumeclaim) (?:\"|')(?:[^\"'/]*/)?([^\"'/]+)(?:\"|')", re.IGNORECASE)
"""As kubelets name objects that are missing: `secret "wandb" not found`, `configmap "team/scripts" not found`."""
_FIELDS = {"ephemeral-storage": "ephemeralStorage"}
"""Fields of `workers.resources` with another name than the resource."""
_KINDS = {"secret": "Secret", "configmap": "ConfigMap", "persistentvolumeclaim": "PersistentVolumeClaim"}


def problem_seconds(problem: str) -> float:
    """Age of a pod at which this problem, `Reason: message`, is reported."""
    named = problem.partition(":")[0] in SPEC_PROBLEMS
    return SPEC_PROBLEM_AFTER_SECONDS if named else PROBLEM_AFTER_SECONDS


def fix_for(problem: str, spec: ParallelTrainingJobSpec, defaulted: Sequence[str] = ()) -> str:
    """What to correct, as sentences without the last period. Empty if it is unknown.

    Args:
        problem: `Reason: message` of the pod.
        spec: The job's spec.
        defaulted: Resources that are missing, and whose requests a LimitRange has set: placement does not count them.
    """
    if defaulted:
        fields = " and ".join(f"`spec.workers.resources.{_FIELDS.get(name, name)}`" for name in defaulted)
        return f"A LimitRange of the namespace has set the pod's request of {' and '.join(defaulted)}. Set {fields}"
    reason = problem.partition(":")[0]
    if reason in _IMAGE and f"{INIT_CONTAINER} {AGENT_VOLUME}" in problem:
        return "Have the administrator check the value `agentImage` of the chart, or check `workers.imagePullSecrets`"
    if reason in _IMAGE and INIT_CONTAINER in problem:
        return "Have the administrator check the images of the profile"
    if reason in _IMAGE:
        secrets = " and `spec.workers.imagePullSecrets`" if reason in ("ErrImagePull", "ImagePullBackOff") else ""
        return f"Check `spec.workers.image`{secrets}"
    match = _NAMED.search(problem)
    if match is None:
        return ""
    kind, name = match[1].lower(), match[2]
    fields = [field for field, named in _references(spec, kind) if named == name]
    where = f", or correct `spec.{fields[0]}`" if fields else ""
    return f"Create {_KINDS[kind]} {name}{where}"


def _references(spec: ParallelTrainingJobSpec, kind: str) -> Iterator[tuple[str, str]]:
    """The fields that name an object of this kind: path below `spec`, and name."""
    if kind == "persistentvolumeclaim":
        yield from claims_of(spec)
        return
    wanted = "secret" if kind == "secret" else "config_map"
    for index, volume in enumerate(spec.workers.volumes):
        name = getattr(volume, f"{wanted}_name")
        if name is not None:
            yield f"workers.volumes[{index}].{'secretName' if wanted == 'secret' else 'configMapName'}", name
    for index, variable in enumerate(spec.workers.env):
        source = getattr(variable.value_from, f"{wanted}_key_ref", None) if variable.value_from is not None else None
        if source is not None:
            field = "secretKeyRef" if wanted == "secret" else "configMapKeyRef"
            yield f"workers.env[{index}].valueFrom.{field}.name", source.name
    if wanted == "config_map" and spec.runtime.scripts is not None:
        yield "runtime.scripts", spec.runtime.scripts
