"""The pods of a TrainJob of Kubeflow Trainer: the template of its runtime, with what the job itself sets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

from meshwright_cli.importing.fields import Fields
from meshwright_cli.importing.settings import ImportFileError

TRAINERS = ("TrainingRuntime", "ClusterTrainingRuntime")
"""Kinds of a runtime."""
_NODE = "node"
"""Name of the trainer's job and of its container in a runtime."""


def template_of_train_job(
    spec: Fields, others: Sequence[Mapping[str, Any]]
) -> tuple[int, str | None, dict[str, Any], list[str]]:
    """Pods, processes of a pod, the pod template, and notes.

    Args:
        spec: the TrainJob's spec.
        others: further objects of the file. If its runtime is one of them, the template is from there.

    Raises:
        ImportFileError: a value has the wrong type.
    """
    runtime, trainer = spec.child("runtimeRef"), spec.child("trainer")
    name = str(runtime.get("name"))
    runtime.ignore("kind", "apiGroup")
    found = next((one for one in others if one.get("kind") in TRAINERS and _name(one) == name), None)
    notes = []
    if found is None:
        notes.append(
            f"to do: the file does not have the runtime `{name}`, whose image, command and resources this job may use: "
            f"append the output of `kubectl get clustertrainingruntime {name} -o yaml` to the file, after a line `---`"
        )
    template, policy = _of_runtime(found)
    container = _container(template)
    with_mpi = policy.get("mpi") or {}
    if with_mpi:  # the nodes run only sshd: the job's command is that of the launcher
        container.pop("command", None)
        container.pop("args", None)
    for field in ("image", "command", "args"):
        if (value := trainer.get(field)) is not None:
            container[field] = value
    container["env"] = _merged(container.get("env"), trainer.get("env"))
    if (resources := trainer.get("resourcesPerNode")) is not None:
        container["resources"] = resources
    for override in spec.children("podTemplateOverrides"):
        _override(template, override)
    for patch in spec.children("runtimePatches"):
        _patch(template, patch)
    nodes = trainer.integer("numNodes") or int(policy.get("numNodes") or 1)
    processes = trainer.get("numProcPerNode") or (policy.get("torch") or with_mpi).get("numProcPerNode")
    return nodes, None if processes is None else str(processes), template, notes


def _name(one: Mapping[str, Any]) -> str:
    return str((one.get("metadata") or {}).get("name"))


def _of_runtime(runtime: Mapping[str, Any] | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """The pod template and the policy of a runtime; a template with an empty container if there is none."""
    empty = {"spec": {"containers": [{"name": _NODE}]}}
    if runtime is None:
        return empty, {}
    try:
        jobs = runtime["spec"]["template"]["spec"]["replicatedJobs"]
        job = next((one for one in jobs if one.get("name") == _NODE), jobs[-1])
        template = deepcopy(job["template"]["spec"]["template"])
        return dict(template), dict(runtime["spec"].get("mlPolicy") or {})
    except (KeyError, TypeError, IndexError, AttributeError):
        raise ImportFileError(f"the runtime `{_name(runtime)}` has no pod template") from None


def _container(template: dict[str, Any]) -> dict[str, Any]:
    containers = template.setdefault("spec", {}).setdefault("containers", [{"name": _NODE}])
    found: dict[str, Any] = next((one for one in containers if one.get("name") in (_NODE, "trainer")), containers[0])
    return found


def _merged(first: Any, second: Any) -> list[Any]:
    """Lists of objects with a name; those of the second replace those of the first."""
    found = {str(one.get("name")): one for one in [*(first or []), *(second or [])] if isinstance(one, Mapping)}
    return list(found.values())


def _override(template: dict[str, Any], override: Fields) -> None:
    """Apply an entry of `podTemplateOverrides` that is for the trainer's pods. Other entries stay unread."""
    targets = [one.get("name") for one in override.children("targetJobs")]
    if targets and _NODE not in targets:
        override.reopen("targetJobs")
        return
    _change(template, override)


def _patch(template: dict[str, Any], patch: Fields) -> None:
    """Apply what an entry of `runtimePatches` says of the trainer's pods. Other parts stay unread."""
    if str(patch.get("manager")).startswith("kueue.x-k8s.io/"):  # the nodes on which Kueue admitted the job
        patch.ignore_all()
        return
    patch.ignore("time")
    job_set = patch.child("trainingRuntimeSpec").child("template")
    job_set.ignore("metadata")
    for job in job_set.child("spec").children("replicatedJobs"):
        if job.get("name") != _NODE:
            job.reopen("name")
            continue
        job.child("template").ignore("metadata")
        _change(template, job.child("template").child("spec").child("template"))


def _change(template: dict[str, Any], changes: Fields) -> None:
    """Change a pod template: `changes` has `metadata` and `spec`."""
    pod, spec = changes.child("spec"), template["spec"]
    metadata = changes.child("metadata")
    for field in ("labels", "annotations"):
        if field in metadata:
            template.setdefault("metadata", {}).setdefault(field, {}).update(metadata.mapping(field))
    for field in (
        "serviceAccountName",
        "nodeSelector",
        "tolerations",
        "affinity",
        "schedulingGates",
        "securityContext",
    ):
        if field in pod:
            spec[field] = pod.get(field)
    for field in ("volumes", "imagePullSecrets", "initContainers"):
        if field in pod:
            spec[field] = _merged(spec.get(field), pod.get(field))
    for one in pod.children("containers"):
        container = _container(template)
        if one.get("name") not in (container.get("name"), _NODE, "trainer"):
            one.reopen("name")
            continue
        for field in ("env", "volumeMounts"):
            if field in one:
                container[field] = _merged(container.get(field), one.get(field))
