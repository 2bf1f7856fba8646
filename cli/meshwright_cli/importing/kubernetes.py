"""Reads a job of another operator: PyTorchJob, MPIJob, HyperPodPyTorchJob, TrainJob, JobSet, or a Job of Volcano or
of Kubernetes itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any

from meshwright.figures import counted
from meshwright.planner.units import count_gpus
from meshwright.rules.command_degrees import MEGATRON_ORDER, MEGATRON_PIPELINE, option_words, stated_degrees
from meshwright.rules.launchers import is_shell_script
from meshwright_cli.importing.fields import Fields
from meshwright_cli.importing.job_kinds import CONTAINERS, KINDS, Gang, Group, volcano_job
from meshwright_cli.importing.launchers import Command, without_launcher
from meshwright_cli.importing.pod_template import NEURON_CORE, NEURON_DEVICE, Pods, is_of_agent, read_pods
from meshwright_cli.importing.settings import Imported, ImportFileError, without_none
from meshwright_cli.importing.train_job import TRAINERS

_VOLCANO_GROUP = "batch.volcano.sh/"
_LAST_APPLIED = "kubectl.kubernetes.io/last-applied-configuration"
_DROPPED = frozenset({"--pre-train-script", "--post-train-script", "--pre-train-args", "--post-train-args"})
RESTARTS = "a restart runs the command again: the script must resume from its own checkpoint"
"""What no job that restarts says of itself."""


def read_objects(objects: Sequence[Mapping[str, Any]]) -> Imported:
    """Read the job among the objects of a file. The others stay as they are, but for the runtime of a TrainJob.

    Raises:
        ImportFileError: there is no such job, or several, or a value has the wrong type.
    """
    jobs = [one for one in objects if one.get("kind") in KINDS]
    if len(jobs) != 1:
        kinds = ", ".join(sorted({str(one.get("kind")) for one in objects}))
        raise ImportFileError(f"expected one of {', '.join(KINDS)}, got {len(jobs)} of them among {kinds}")
    job, others = Fields(jobs[0]), [one for one in objects if one is not jobs[0]]
    kind = str(job.get("kind"))
    in_volcano = str(job.get("apiVersion")).startswith(_VOLCANO_GROUP)
    job.ignore("status")
    metadata = job.child("metadata")
    gang = (volcano_job if in_volcano else KINDS[kind])(job.child("spec"), others)
    spec, notes = read_gang(gang)
    named = {
        "name": metadata.get("name"),
        "namespace": metadata.get("namespace"),
        "labels": metadata.mapping("labels"),
        "annotations": {key: value for key, value in metadata.mapping("annotations").items() if key != _LAST_APPLIED},
    }
    metadata.ignore_all()
    kept = [f"{one.get('kind')} `{(one.get('metadata') or {}).get('name')}` stays as it is" for one in others]
    notes += [line for line in kept if not line.startswith(tuple(TRAINERS))]
    return Imported(
        f"{kind} of Volcano" if in_volcano else kind,
        spec,
        list(job.unread()),
        [*notes, RESTARTS],
        metadata=without_none(named),
    )


def read_gang(gang: Gang) -> tuple[dict[str, Any], list[str]]:
    """The spec of a job, and what differs, from what a kind says about all its pods.

    Raises:
        ImportFileError: it has no pods, or a value has the wrong type.
    """
    pods = read_pods(_main_group(gang).template, CONTAINERS)
    spec = _spec(gang, pods)
    return spec, [*gang.notes, *pods.notes]


def _main_group(gang: Gang) -> Group:
    """The group whose template the workers have; groups without ranks are taken out of the gang."""
    groups = [group for group in gang.groups if group.pods > 0]
    groups = [group for group in groups if not _is_launcher(gang, group, groups)]
    if not groups:
        raise ImportFileError("the job has no pods")
    with_gpus = [group for group in groups if _gpus(group)]
    ranks = with_gpus or groups
    for group in groups:
        if group not in ranks:
            gang.notes.append(f"no equivalent: the pods of `{group.name}`, which have no GPUs")
            group.template.ignore_all()
    main = ranks[-1]
    for group in ranks[:-1]:
        if not group.template.same_as(main.template):
            gang.notes.append(f"the pods of `{group.name}` differ: all workers get the template of `{main.name}`")
        group.template.ignore_all()
    gang.groups = ranks
    return main


def _is_launcher(gang: Gang, group: Group, groups: Sequence[Group]) -> bool:
    """Whether a group only runs `mpirun`, which starts the ranks in the pods of others by SSH. It becomes the launcher
    of the gang.
    """
    pods = group.read()
    waiting = any(_runs_sshd(other.read().command) for other in groups if other is not group)
    if gang.launcher is not None or pods.gpus or not waiting or not without_launcher(pods.command).is_mpi:
        return False
    gang.launcher = pods
    group.template.ignore_all()
    return True


def _runs_sshd(command: Sequence[str]) -> bool:
    return any("sshd" in word for word in command)


def _gpus(group: Group) -> int:
    return group.read().gpus


def _spec(gang: Gang, pods: Pods) -> dict[str, Any]:
    """The job's spec, from what the kind and the template say. Adds what differs to the notes of `gang`."""
    started = pods.command if gang.launcher is None else gang.launcher.command
    command = without_launcher(started)
    processes = _processes(command.options.get("--nproc-per-node"), gang.processes, pods.gpus)
    _use_neuron_cores(pods, processes)
    ranks = pods.gpus or processes or 1
    if not pods.gpus:
        gang.notes.append("the pods request no GPUs: each rank of a worker requests one of `workers.gpuResource`")
    elif processes not in (None, pods.gpus):
        gang.notes.append(
            f"a pod has {processes} processes for {count_gpus(pods.gpus)}: a worker has one rank for each GPU"
        )
    gang.notes.extend(_about_command(command, started))
    total = sum(group.pods for group in gang.groups)
    if command.is_mpi:
        gang.notes.extend(_about_mpi(command, started, total * ranks))
    elif gang.launcher is not None:
        gang.notes.append("to do: the command is that of the launcher: write what it starts as `runtime.command`")
    degrees, words = _degrees(command.words, total * ranks, gang.notes)
    ranks_of_replica = prod(degrees.values())
    workers = {**pods.workers, "volumes": [*pods.workers.get("volumes", ()), *gang.volumes] or None}
    workers |= gang.spec.pop("workers", {})
    workers["env"] = _variables(workers.get("env") or [], command, gang.launcher) or None
    least, most = gang.pods
    restarts = command.options.get("--max-restarts", "")
    recovery = gang.spec.pop("recovery", {})
    if restarts.isdigit():
        recovery.setdefault("maxRestarts", int(restarts))
    return without_none(
        {
            "replicas": total * ranks // ranks_of_replica,
            "elastic": {
                "minReplicas": least and max(1, least * ranks // ranks_of_replica),
                "maxReplicas": most and max(most, total) * ranks // ranks_of_replica,
            },
            "parallelism": degrees,
            "runtime": {"command": words or None, "agent": "Injected"},
            "workers": {**workers, "gpusPerWorker": ranks},
            "recovery": recovery,
            **gang.spec,
            "priorityClassName": gang.spec.get("priorityClassName") or pods.priority_class,
        }
    )


def _degrees(command: list[str], ranks: int, notes: list[str]) -> tuple[dict[str, int], list[str]]:
    """`spec.parallelism` by the command's options, and the command, in which Megatron-LM gets the order of the mesh."""
    found, words = stated_degrees(command), option_words(command)
    if "pipeline" in found and MEGATRON_ORDER not in words:
        if any(word.partition("=")[0] == MEGATRON_PIPELINE for word in words) and not is_shell_script(command):
            command = [*command, MEGATRON_ORDER]
            notes.append(f"`{MEGATRON_ORDER}` is added: the stages of a replica are placed next to each other")
        else:
            degree = found.pop("pipeline")
            notes.append(
                f"to do: the command has {degree} pipeline stages: if ranks with consecutive numbers are those of a "
                f"replica, as with Megatron's `{MEGATRON_ORDER}`, set `parallelism.pipeline: {degree}` and divide "
                "`replicas` by it"
            )
    if ranks % prod(found.values()):
        stated = " x ".join(f"{name} {degree}" for name, degree in found.items())
        notes.append(f"to do: the degrees of the command ({stated}) do not divide {ranks} ranks: set `parallelism`")
        return {}, command
    return found, command


def _use_neuron_cores(pods: Pods, processes: int | None) -> None:
    """Request cores of AWS Neuron in place of devices, if a device has several processes. A rank has one of them."""
    of_devices = pods.workers.get("gpuResource") == NEURON_DEVICE
    if of_devices and processes and processes > pods.gpus and processes % pods.gpus == 0:
        pods.workers["gpuResource"] = NEURON_CORE
        pods.notes.append(f"{pods.gpus} `{NEURON_DEVICE}` of a pod are {processes} `{NEURON_CORE}`: one for each rank")
        pods.gpus = processes


def _processes(of_launcher: str | None, of_job: str | None, gpus: int) -> int | None:
    """Processes of a pod, if a number says so."""
    for value in (of_launcher, of_job):
        if value is not None and str(value).isdigit():
            return int(value)
        if value in ("gpu", "auto"):
            return gpus or None
    return None


def _about_command(command: Command, started: Sequence[str]) -> Iterator[str]:
    """What differs for the script. `started` is the command of a pod."""
    if command.removed is not None and not command.is_mpi:
        yield f"`{command.removed}` is left out: each rank runs its script with the variables that it sets"
    for name in sorted(_DROPPED & set(command.options)):
        yield f"no equivalent: {name} of `{command.removed}`"
    if command.left is not None:
        yield f"to do: the command runs `{command.left}`, which starts ranks itself: run the script, once for each rank"
    if _runs_sshd(started) and not command.is_mpi:
        yield "to do: the ranks wait for a launcher, such as `mpirun`: write what that starts as `runtime.command`"
    if not started:
        yield "to do: the image's own entry point is not run: write it as `runtime.command`"
    elif started[0].endswith("sh") and command.left is None:
        yield "the shell's script runs once for each rank, not once for each pod"
        if not is_shell_script(started):
            yield "to do: if the script runs `torchrun`, run what that starts instead: each rank would train alone"


def _about_mpi(command: Command, started: Sequence[str], ranks: int) -> Iterator[str]:
    yield (
        f"to do: `{command.removed}` is left out, and MPI with it: each rank runs what it starts, with the variables "
        "of torchrun. Read `RANK`, `LOCAL_RANK` and `WORLD_SIZE` for those of MPI. What calls MPI itself, such as "
        "Horovod or NCCL's tests, does not find the other ranks"
    )
    if _runs_sshd(started):
        yield "to do: take what starts `sshd` out of the script: the ranks need no SSH"
    processes = command.options.get("np", "")
    if processes.isdigit() and int(processes) != ranks:
        has = counted(ranks, "rank")
        yield f"`{command.removed}` starts {processes} processes: the job has {has}, one for each GPU"


def _variables(
    own: Sequence[Mapping[str, Any]], command: Command, launcher: Pods | None
) -> Sequence[Mapping[str, Any]]:
    """`workers.env`, with the variables that a launcher sets for its ranks."""
    of_launcher = {} if launcher is None else {one["name"]: one for one in launcher.workers.get("env", ())}
    merged = {one["name"]: one for one in own}
    for name, value in command.variables.items():
        if is_of_agent(name):
            continue
        if value is not None:
            merged[name] = {"name": name, "value": value}
        elif name in of_launcher:
            merged[name] = of_launcher[name]
    return list(merged.values())
