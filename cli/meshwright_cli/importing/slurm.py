"""Reads a batch script of Slurm, or another script with a launcher: what `srun` or `torchrun` starts on each node
becomes the command of a job.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from meshwright.api.labels import GPU_RESOURCE
from meshwright.rules.launchers import is_shell_script, launcher_of
from meshwright_cli.importing.batch_script import (
    BatchScript,
    Line,
    directives,
    is_batch_script,
    plain_words,
    quoted,
    read_script,
    replaced,
)
from meshwright_cli.importing.fields import Fields, whole_number
from meshwright_cli.importing.job_kinds import Gang, Group
from meshwright_cli.importing.kubernetes import RESTARTS, read_gang
from meshwright_cli.importing.launchers import without_launcher
from meshwright_cli.importing.pod_template import is_of_agent
from meshwright_cli.importing.settings import Imported, ImportFileError, job_name

_UNITS = {"": "Mi", "K": "Ki", "M": "Mi", "G": "Gi", "T": "Ti"}
_OF_RANKS = {
    "SLURM_PROCID": "${RANK}",
    "SLURM_LOCALID": "${LOCAL_RANK}",
    "SLURM_NODEID": "${GROUP_RANK}",
    "SLURM_NTASKS": "${WORLD_SIZE}",
    "SLURM_NPROCS": "${WORLD_SIZE}",
}
"""Variables of each task of Slurm, and those of a rank."""
_SETUP = frozenset({"module", "ml", "source", ".", "conda", "mamba", "micromamba", "spack", "eval", "cd", "pip", "uv"})
"""Commands that prepare the environment of those after them."""
_MOST_NAMED = 5
_NO_GPUS = (
    "to do: the script does not state the GPUs of a node: pass --gpus for those of all nodes. Each rank of a worker "
    "requests one of `workers.gpuResource`"
)
_WITHOUT_EFFECT = frozenset({
    "auto-resume", "begin", "chdir", "container-mount-home", "container-name", "container-remap-root",
    "container-workdir", "container-writable", "cores-per-socket", "cpu-bind", "distribution", "error", "exact",
    "exclusive", "export", "get-user-env", "gpu-bind", "hint", "input", "jobid", "jobs-per-gpu",
    "kill-on-bad-exit", "label", "mail-type", "mail-user", "mem-bind", "mpi", "network", "nice",
    "no-container-mount-home", "no-container-remap-root", "no-kill", "nodes", "ntasks", "ntasks-per-core",
    "ntasks-per-gpu", "ntasks-per-node", "open-mode", "output", "overcommit", "overlap", "oversubscribe",
    "parsable", "propagate", "pty", "quiet", "requeue", "sockets-per-node", "threads-per-core", "tres-bind",
    "tres-per-task", "unbuffered", "use-min-nodes", "verbose", "wait", "wait-all-nodes",
})  # fmt: skip
"""Options of what Meshwright does in its own way, or of the log, which `meshwright logs` prints."""
_INSTEAD = {
    "account": "a queue of Kueue or a policy counts by namespace",
    "array": "apply a job for each of its tasks",
    "constraint": "`workers.nodeSelector` chooses nodes by label",
    "container-mounts": "`workers.volumes` mounts claims, a profile of the administrator host paths",
    "dependency": "pipelines of Argo Workflows or Tekton run jobs one after the other",
    "exclude": "cordon the nodes, or choose others by `workers.nodeSelector`",
    "nodelist": "`workers.nodeSelector` chooses nodes by label",
    "partition": "`workers.nodeSelector` chooses nodes by label, a queue who may use them",
    "qos": "`priorityClassName`",
    "reservation": "`workers.nodeSelector` and `workers.tolerations` choose reserved nodes",
    "signal": "ranks get SIGTERM `workers.terminationGracePeriodSeconds` before they are killed",
    "switches": "`topology` requires a level of the fabric",
}
"""Options without an equivalent, and what is there instead."""


@dataclass(frozen=True, slots=True)
class Allocation:
    """What a batch script says beside its command, for a script whose command another reader understands."""

    gpus: int | None
    """GPUs of all nodes, if the directives state them."""
    spec: dict[str, Any]
    """Fields of the job's spec."""
    metadata: dict[str, Any]
    without_equivalent: list[str]
    script: str
    """The script with the values of its variables, as far as they are known."""


def allocation(text: str) -> Allocation:
    """Read what a batch script says beside its command.

    Raises:
        ImportFileError: a value has the wrong type, or quotes do not match.
    """
    options = directives(text)
    variables = read_script(text, _known(options)).variables
    spec = {"activeDeadlineSeconds": _seconds(options.get("time", ""))}
    script = "".join(f"{replaced(line, variables)}\n" for line in text.splitlines())
    gpus = _nodes(options) * _gpus(options) or None
    return Allocation(gpus, spec, _metadata(options), list(_without_equivalent(options)), script)


def _metadata(options: Mapping[str, str]) -> dict[str, Any]:
    name = job_name(options.get("job-name", ""))
    return {"name": name} if name else {}


def starts_ranks(text: str) -> bool:
    """Whether the text is a script or a command line that runs a launcher, such as `torchrun`."""
    if "```" in text:
        return False
    try:
        return any(launcher_of(line.command()) is not None for line in read_script(text, {}).lines)
    except ImportFileError:
        return False


def is_option(name: str) -> bool:
    """Whether sbatch or srun has an option of this name."""
    return name in _READ | _WITHOUT_EFFECT or name in _INSTEAD


def read(text: str, all_gpus: int | None) -> Imported:
    """Read a batch script.

    Args:
        text: the script.
        all_gpus: GPUs of all nodes, if the script does not state those of a node.

    Raises:
        ImportFileError: it starts nothing, or a value has the wrong type.
    """
    script = read_script(text, _known(directives(text)))
    line = _main_line(script)
    own = {name: value for name, value in (line.options or {}).items() if "$" not in value}
    stated, elastic = _of_launcher(line)
    options = {**stated, **script.options, **own}
    nodes, gpus = _nodes(options), _gpus(options)
    gpus = gpus or (all_gpus or 0) // nodes
    notes = list(_notes(script, line))
    tasks = _tasks_of_node(options, nodes)
    gang = Gang([Group("node", nodes, Fields(_template(script, line, options, gpus, tasks, notes)))])
    gang.processes = str(tasks) if tasks and launcher_of(line.command()) is None else None
    gang.pods = elastic if "nodes" not in script.options else (None, None)
    gang.spec = {
        "activeDeadlineSeconds": _seconds(options.get("time", "")),
        "recovery": {"maxRestarts": 0} if "no-requeue" in options else {},
    }
    spec, found = read_gang(gang)
    # `--nproc-per-node=gpu` and a variable of the node say no number.
    if not gpus and not without_launcher(line.command()).options.get("--nproc-per-node", "").isdigit():
        notes.append(_NO_GPUS)
    found = [note for note in found if not note.startswith(("the pods request no GPUs", "the shell's script runs"))]
    if command := spec.get("runtime", {}).get("command"):
        spec["runtime"]["command"] = _of_ranks(command, found)
    found += [f"no equivalent: {text}" for text in _without_equivalent(options)]
    if spec.get("recovery", {}).get("maxRestarts") != 0:
        found.append(RESTARTS)
    kind = "batch script of Slurm" if is_batch_script(text) else "script"
    return Imported(kind, spec, [], [*notes, *found], _metadata(script.options))


def _of_launcher(line: Line) -> tuple[dict[str, str], tuple[int | None, int | None]]:
    """The number of nodes that a launcher's options state, as an option of Slurm, and their range in `--nnodes=2:4`."""
    options = without_launcher(line.command()).options
    least, colon, most = options.get("--nnodes", "").partition(":")
    if least.isdigit():
        return {"nodes": least}, (int(least), int(most)) if colon and most.isdigit() else (None, None)
    processes, of_node = options.get("np", ""), options.get("--nproc-per-node", "")
    if processes.isdigit() and of_node.isdigit() and int(of_node):
        return {"nodes": str(max(1, int(processes) // int(of_node)))}, (None, None)
    return {}, (None, None)


def _main_line(script: BatchScript) -> Line:
    """The command that starts the ranks: the last `srun`, of a launcher or Python if there is one; without `srun`, the
    last launcher or Python.
    """
    started = [line for line in script.lines if line.options is not None and line.text]
    ranked = [
        [line for line in started if launcher_of(line.command()) is not None],
        [line for line in started if line.program.startswith("python") and " -c " not in line.text],
        started,
        [line for line in script.lines if launcher_of(line.command()) is not None],
        [line for line in script.lines if line.program.startswith("python")],
        [line for line in script.lines if line.program not in _SETUP],
    ]
    found = next((lines for lines in ranked if lines), None)
    if found is None:
        raise ImportFileError("the script starts nothing: expected `srun`, `torchrun` or `python`")
    return found[-1]


def _notes(script: BatchScript, main: Line) -> Iterator[str]:
    """What the job does not run, and what the script must not read."""
    setup = [line for line in script.lines if line is not main and line.program in _SETUP]
    others = [line for line in script.lines if line is not main and line.program not in _SETUP]
    if setup:
        named = "; ".join(quoted([line.text]) for line in setup[:_MOST_NAMED])
        more = f", and {len(setup) - _MOST_NAMED} more" if len(setup) > _MOST_NAMED else ""
        yield f"to do: bring into the image what the script sets up: {named}{more}"
    for line in others[:_MOST_NAMED]:
        started = "srun " if line.options is not None else ""
        yield f"to do: the job does not run `{quoted([started + line.text])}`: run it before, or in the command"
    if len(others) > _MOST_NAMED:
        yield f"to do: nor does it run {len(others) - _MOST_NAMED} more commands of the script"
    if script.controlled:
        yield "to do: the script has loops or conditions: what runs is taken as if all of it did"
    for name in dict.fromkeys(script.unknown):
        if not is_of_agent(name):
            yield f"no equivalent: export {name}: its value is known on the node only; set it in the command"
    if main.program.endswith((".sh", ".bash")) or (
        main.program in ("bash", "sh") and not is_shell_script(main.command())
    ):
        yield "to do: the script in the command runs once for each rank: variables of Slurm are not set in it"


def _template(
    script: BatchScript, line: Line, options: Mapping[str, str], gpus: int, tasks: int, notes: list[str]
) -> dict[str, Any]:
    """The pod template that stands for a node of the allocation."""
    limits: dict[str, Any] = {GPU_RESOURCE: gpus} if gpus else {}
    per_task = options.get("cpus-per-task")
    if per_task:
        limits["cpu"] = str(whole_number("--cpus-per-task", per_task) * max(1, tasks))
    elif gpus and (per_gpu := options.get("cpus-per-gpu")):
        limits["cpu"] = str(whole_number("--cpus-per-gpu", per_gpu) * gpus)
    if memory := _memory(options, gpus, limits):
        limits["memory"] = memory
    image = options.get("container-image", "").removeprefix("docker://").replace("#", "/")
    if not image:
        notes.append("to do: set `workers.image` to an image with what the script uses")
    elif image.startswith("/") or image.endswith(".sqsh"):
        notes.append(f"to do: {image} is a file: set `workers.image` to the image that it was made from")
        image = ""
    variables = {**script.exports, **line.variables}
    container: dict[str, Any] = {
        "name": "trainer",
        "image": image or None,
        "command": line.command(),
        "resources": {"limits": limits},
        "env": [{"name": name, "value": value} for name, value in variables.items() if not _is_of_slurm(name)],
    }
    if options.get("container-workdir") or options.get("chdir"):
        container["workingDir"] = options.get("container-workdir") or options.get("chdir")
    return {"spec": {"containers": [container]}}


def _of_ranks(command: list[str], notes: list[str]) -> list[str]:
    """The command with a rank's variables in place of Slurm's, and without a shell that it does not need."""

    def own(match: re.Match[str]) -> str:
        return _OF_RANKS.get(match[1] or match[2], match[0])

    found = [re.sub(r"\$(?:\{(SLURM_\w+)\}|(SLURM_\w+))", own, word) for word in command]
    left = sorted({match for word in found for match in re.findall(r"SLURM_\w+", word)})
    if left:
        notes.append(f"to do: the command reads {', '.join(left)}, which Kubernetes does not set: replace them")
    return (plain_words(found[2]) or found) if is_shell_script(found) else found


def _is_of_slurm(name: str) -> bool:
    return name.startswith(("SLURM_", "SRUN_", "SBATCH_", "PMI_", "PMIX_")) or is_of_agent(name)


def _known(options: Mapping[str, str]) -> dict[str, str]:
    """Values of Slurm's variables that the directives state."""
    nodes, gpus = _nodes(options), _gpus(options)
    tasks = _tasks_of_node(options, nodes)
    found = dict.fromkeys(("SLURM_NNODES", "SLURM_JOB_NUM_NODES"), str(nodes))
    if gpus:
        found |= dict.fromkeys(("SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_NODE"), str(gpus))
    if tasks:
        found |= {"SLURM_NTASKS_PER_NODE": str(tasks), "SLURM_NTASKS": str(tasks * nodes)}
    if cpus := options.get("cpus-per-task"):
        found["SLURM_CPUS_PER_TASK"] = cpus
    if name := options.get("job-name"):
        found["SLURM_JOB_NAME"] = name
    return found


def _nodes(options: Mapping[str, str]) -> int:
    """Nodes of the allocation: the least of a range. Without a number, those for the tasks or GPUs."""
    if stated := options.get("nodes"):
        return _positive("--nodes", re.split(r"[-,]", stated, maxsplit=1)[0])
    tasks, per_node = options.get("ntasks"), options.get("ntasks-per-node")
    if tasks and per_node:
        return max(1, _positive("--ntasks", tasks) // _positive("--ntasks-per-node", per_node))
    whole, part = options.get("gpus"), options.get("gpus-per-node")
    if whole and part:
        return max(1, _count("gpus", whole) // max(1, _count("gpus-per-node", part)))
    return 1


def _tasks_of_node(options: Mapping[str, str], nodes: int) -> int:
    """Tasks of a node, 0 if nothing says how many."""
    if stated := options.get("ntasks-per-node"):
        return _positive("--ntasks-per-node", stated)
    if stated := options.get("ntasks"):
        return max(1, _positive("--ntasks", stated) // nodes)
    return 0


def _positive(option: str, value: str) -> int:
    """The value of an option with an integer above 0.

    Raises:
        ImportFileError: it has another one.
    """
    number = whole_number(option, value)
    if number < 1:
        raise ImportFileError(f"{option} must be at least 1, got {value!r}")
    return number


def _gpus(options: Mapping[str, str]) -> int:
    """GPUs of a node, 0 if nothing says how many."""
    nodes = _nodes(options)
    if stated := options.get("gpus-per-node"):
        return _count("gpus-per-node", stated)
    for part in options.get("gres", "").split(","):
        if part.startswith("gpu"):
            return _count("gres", part.removeprefix("gpu").removeprefix(":") or "1")
    if stated := options.get("gpus-per-task"):
        return _count("gpus-per-task", stated) * max(1, _tasks_of_node(options, nodes))
    if stated := options.get("gpus"):
        return max(1, _count("gpus", stated) // nodes)
    return 0


def _count(option: str, value: str) -> int:
    """The number in `8` or `h100:8`, or the sum over several types."""
    parts = (part.rpartition(":")[2].partition("(")[0] for part in value.split(","))
    return sum(1 if not part.isdigit() and ":" not in value else whole_number(f"--{option}", part) for part in parts)


def _memory(options: Mapping[str, str], gpus: int, limits: Mapping[str, Any]) -> str | None:
    """Memory of a node as a quantity of Kubernetes. None if it is all of the node, or not stated."""
    factor, stated = 1, options.get("mem")
    if stated is None and gpus and options.get("mem-per-gpu"):
        factor, stated = gpus, options["mem-per-gpu"]
    if stated is None and "cpu" in limits and options.get("mem-per-cpu"):
        factor, stated = int(limits["cpu"]), options["mem-per-cpu"]
    match = re.fullmatch(r"(\d+)([KMGT]?)B?", (stated or "0").upper())
    if match is None:
        raise ImportFileError(f"`--mem` must be a size such as 512G, got {stated!r}")
    return f"{int(match[1]) * factor}{_UNITS[match[2]]}" if int(match[1]) else None


def _seconds(limit: str) -> int | None:
    """Seconds of a time limit: `MM`, `MM:SS`, `HH:MM:SS`, `D-HH`, `D-HH:MM` or `D-HH:MM:SS`."""
    if limit.upper() in ("", "0", "UNLIMITED", "INFINITE"):
        return None
    days, dash, rest = limit.rpartition("-")
    parts = rest.split(":")
    if not all(part.isdigit() for part in (*parts, days or "0")) or len(parts) > 3:
        raise ImportFileError(f"`--time` must be a time such as 2-00:00:00, got {limit!r}")
    numbers = [int(part) for part in parts]
    if dash or len(numbers) == 3:
        hours, minutes, seconds = [*numbers, 0, 0][:3]
    else:
        hours, minutes, seconds = 0, *[*numbers, 0][:2]
    return int(timedelta(int(days or 0), seconds, minutes=minutes, hours=hours).total_seconds())


def _without_equivalent(options: Mapping[str, str]) -> Iterator[str]:
    """Options that a job does not have, and what is there instead."""
    for name, value in sorted(options.items()):
        stated = f"--{name}={value}" if value else f"--{name}"
        if name in _INSTEAD:
            yield f"{stated}: {_INSTEAD[name]}"
        elif name not in _READ | _WITHOUT_EFFECT:
            yield stated
    types = re.findall(r"(?:^|gpu:|,)([a-zA-Z][\w.-]*):\d", ",".join(_gpu_options(options)))
    for kind in sorted(set(types) - {"gpu"}):
        label = "such as nvidia.com/gpu.product"
        yield f"GPUs of the type `{kind}`: `workers.nodeSelector` chooses nodes by a label, {label}"


def _gpu_options(options: Mapping[str, str]) -> list[str]:
    return [options[name] for name in ("gres", "gpus", "gpus-per-node", "gpus-per-task") if name in options]


_READ = frozenset({
    "container-image", "cpus-per-gpu", "cpus-per-task", "gpus", "gpus-per-node", "gpus-per-task", "gres", "job-name",
    "mem", "mem-per-cpu", "mem-per-gpu", "no-requeue", "time",
})  # fmt: skip
