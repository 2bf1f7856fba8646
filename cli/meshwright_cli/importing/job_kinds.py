"""What each kind of job says about its pods: one reader for each kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from meshwright_cli.importing.fields import Fields
from meshwright_cli.importing.pod_template import Pods, read_pods
from meshwright_cli.importing.settings import ImportFileError
from meshwright_cli.importing.train_job import template_of_train_job

CONTAINERS = ("pytorch", "node", "trainer")
"""Names of the container of the ranks, as these kinds have it."""
_BY_CODE = (
    "to do: with `restartPolicy: ExitCode`, a process that exits with 1 to 127 fails the job: name the codes of yours "
    "in `recovery.exitCodes`, with `action: FailJob`. Here, each failure restarts the job, up to `recovery.maxRestarts`"
)


@dataclass(slots=True)
class Group:
    """Pods with the same template."""

    name: str
    pods: int
    template: Fields

    def read(self) -> Pods:
        """What the template says, without a mark that it was read."""
        return read_pods(Fields(self.template.raw, self.template.path), CONTAINERS)


@dataclass(slots=True)
class Gang:
    """What a kind says about all pods of a job."""

    groups: list[Group]
    processes: str | None = None
    """Processes of a pod: a number, or `auto`, `gpu` or `cpu`."""
    spec: dict[str, Any] = field(default_factory=dict)
    """Fields of the job's spec."""
    pods: tuple[int | None, int | None] = (None, None)
    """Least and most pods of an elastic job."""
    volumes: list[dict[str, Any]] = field(default_factory=list)
    """Entries of `workers.volumes` that all pods have."""
    notes: list[str] = field(default_factory=list)
    launcher: Pods | None = None
    """The pod that starts the ranks in the others."""


def _pytorch_job(spec: Fields, _: Sequence[Mapping[str, Any]]) -> Gang:
    roles = spec.child("pytorchReplicaSpecs")
    groups, never, by_code = [], False, False
    for name in ("Master", "Worker"):
        if name in roles:
            role = roles.child(name)
            groups.append(Group(name, _number(role, "replicas"), role.child("template")))
            never = never or role.get("restartPolicy") == "Never"
            by_code = by_code or role.get("restartPolicy") == "ExitCode"
    elastic, policy = spec.child("elasticPolicy"), spec.child("runPolicy")
    elastic.ignore("rdzvBackend", "rdzvHost", "rdzvPort", "rdzvId", "rdzvConf", "standalone")
    processes = spec.get("nprocPerNode") or elastic.get("nProcPerNode")
    restarts = policy.integer("backoffLimit")
    most_restarts = elastic.integer("maxRestarts")
    found = _of_run_policy(policy)
    found["recovery"] = {"maxRestarts": 0 if never else most_restarts if restarts is None else restarts}
    found["successPolicy"] = "FirstWorker" if "Master" in roles else None
    pods = (elastic.integer("minReplicas"), elastic.integer("maxReplicas"))
    return Gang(groups, _text(processes), found, pods=pods, notes=[_BY_CODE] if by_code else [])


def _mpi_job(spec: Fields, _: Sequence[Mapping[str, Any]]) -> Gang:
    """The workers run what the launcher starts in them."""
    roles = spec.child("mpiReplicaSpecs")
    if "Launcher" not in roles or "Worker" not in roles:
        raise ImportFileError("`spec.mpiReplicaSpecs` must have `Launcher` and `Worker`")
    launcher, worker = roles.child("Launcher"), roles.child("Worker")
    gang = Gang([Group("Worker", _number(worker, "replicas"), worker.child("template"))])
    starting = Group("Launcher", 1, launcher.child("template"))
    gang.launcher = starting.read()
    starting.template.ignore_all()
    for role in (launcher, worker):
        role.ignore("replicas", "restartPolicy")
    gang.processes = _text(spec.get("slotsPerWorker"))
    if spec.get("runLauncherAsWorker"):
        gang.groups[0].pods += 1
        gang.notes.append("the launcher, which runs ranks too, becomes a worker")
    policy = spec.child("runPolicy")
    gang.spec = _of_run_policy(policy)
    gang.spec["recovery"] = {"maxRestarts": policy.integer("backoffLimit")}
    spec.ignore("launcherCreationPolicy", "mpiImplementation", "sshAuthMountPath", "mainContainer")
    return gang


def _hyperpod_job(spec: Fields, _: Sequence[Mapping[str, Any]]) -> Gang:
    groups, spares = [], 0
    for role in spec.children("replicaSpecs"):
        groups.append(Group(str(role.get("name")), _number(role, "replicas"), role.child("template")))
        spares += role.integer("spares") or 0
    policy, elastic = spec.child("runPolicy"), spec.child("elasticPolicy")
    found = _of_policy(policy)
    found["recovery"] = {"maxRestarts": policy.integer("jobMaxRetryCount"), "spareNodes": spares or None}
    restart = policy.child("restartPolicy")
    found["recovery"]["restartWindowSeconds"] = restart.integer("evalPeriodSeconds")
    replacement = elastic.integer("faultyScaleDownTimeoutInSeconds")
    gang = Gang(
        groups,
        _text(spec.get("nprocPerNode")),
        found,
        pods=(elastic.integer("minReplicas"), elastic.integer("maxReplicas")),
    )
    if replacement is not None:
        gang.notes.append(f"set `elastic.replacementSeconds: {replacement}` for `faultyScaleDownTimeoutInSeconds`")
    if "logMonitoringConfiguration" in policy:
        gang.notes.append(
            "hangs are found by steps, not by rules for the log: `runtime.progress.patterns` says how the log has them"
        )
    return gang


def _train_job(spec: Fields, others: Sequence[Mapping[str, Any]]) -> Gang:
    found = _of_policy(spec)
    nodes, processes, template, notes = template_of_train_job(spec, others)
    return Gang([Group("node", nodes, Fields(template, "spec.trainer"))], processes, found, notes=notes)


def _job_set(spec: Fields, _: Sequence[Mapping[str, Any]]) -> Gang:
    groups = []
    for replicated in spec.children("replicatedJobs"):
        job = replicated.child("template").child("spec")
        replicated.child("template").ignore("metadata")
        parallelism = _number(job, "parallelism")
        job.ignore("completions", "completionMode", "backoffLimit", "podReplacementPolicy")
        name = str(replicated.get("name"))
        groups.append(Group(name, _number(replicated, "replicas") * parallelism, job.child("template")))
    policy = spec.child("failurePolicy")
    found = _of_policy(spec)
    found["recovery"] = {"maxRestarts": policy.integer("maxRestarts")}
    policy.ignore("restartStrategy")
    spec.ignore("network", "coordinator")
    success = spec.child("successPolicy")
    if success.get("operator") != "Any" and "targetReplicatedJobs" not in success:
        success.ignore_all()
    return Gang(groups, None, found)


def _batch_job(spec: Fields, _: Sequence[Mapping[str, Any]]) -> Gang:
    found = _of_policy(spec)
    rules = []
    for rule in spec.child("podFailurePolicy").children("rules"):
        codes = rule.child("onExitCodes")
        if codes and codes.get("operator") == "In" and rule.get("action") in ("FailJob", "Ignore", "Count"):
            rules.append({"values": codes.get("values"), "action": rule.get("action")})
            codes.ignore("containerName")
        elif codes:
            codes.reopen("operator")
    found["recovery"] = {"maxRestarts": spec.integer("backoffLimit"), "exitCodes": rules or None}
    spec.ignore("completions", "completionMode", "podReplacementPolicy", "selector", "manualSelector")
    return Gang([Group("job", _number(spec, "parallelism"), spec.child("template"))], None, found)


def volcano_job(spec: Fields, _: Sequence[Mapping[str, Any]]) -> Gang:
    """Read a Job of Volcano, whose kind is that of Kubernetes' own."""
    groups = []
    for task in spec.children("tasks"):
        groups.append(Group(str(task.get("name")), _number(task, "replicas"), task.child("template")))
        task.ignore("minAvailable")
    found = _of_policy(spec)
    found["recovery"] = {"maxRestarts": spec.integer("maxRetry")}
    found["priorityClassName"] = spec.get("priorityClassName")
    if spec.get("minAvailable") not in (None, sum(group.pods for group in groups)):
        spec.reopen("minAvailable")
    queue, scheduler = spec.get("queue"), spec.get("schedulerName") or "volcano"
    gang = Gang(groups, None, found)
    if queue not in (None, "default"):
        found["workers"] = {"schedulerName": scheduler, "podGroup": {"kind": "Volcano", "queue": queue}}
        gang.notes.append(f"`{scheduler}` places the pods, for the queue `{queue}`: without it, Meshwright places them")
    for volume in spec.children("volumes"):
        if volume.get("volumeClaimName"):
            claim = {"claimName": volume.get("volumeClaimName"), "mountPath": volume.get("mountPath")}
            gang.volumes.append({"name": f"claim-{len(gang.volumes)}", **claim})
    spec.ignore("plugins")
    return gang


def _of_policy(policy: Fields) -> dict[str, Any]:
    """The fields that all kinds have, at different places."""
    manager = policy.get("managedBy")
    if manager is not None and not str(manager).startswith("kueue"):
        manager = None
    return {
        "suspend": bool(policy.get("suspend")) or None,
        "activeDeadlineSeconds": policy.integer("activeDeadlineSeconds"),
        "ttlSecondsAfterFinished": policy.integer("ttlSecondsAfterFinished"),
        "managedBy": manager,
    }


def _of_run_policy(policy: Fields) -> dict[str, Any]:
    """The fields of Kubeflow's `runPolicy`."""
    scheduling = policy.child("schedulingPolicy")
    scheduling.ignore("minAvailable")
    return {**_of_policy(policy), "priorityClassName": scheduling.get("priorityClass")}


def _number(fields: Fields, name: str) -> int:
    """A number of pods, by default 1."""
    value = fields.integer(name)
    return 1 if value is None else value


def _text(value: Any) -> str | None:
    return None if value is None else str(value)


KINDS: dict[str, Callable[[Fields, Sequence[Mapping[str, Any]]], Gang]] = {
    "PyTorchJob": _pytorch_job,
    "MPIJob": _mpi_job,
    "HyperPodPyTorchJob": _hyperpod_job,
    "TrainJob": _train_job,
    "JobSet": _job_set,
    "Job": _batch_job,
}
"""Readers by kind."""
