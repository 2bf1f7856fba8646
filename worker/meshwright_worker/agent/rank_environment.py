"""The environment of a rank's process: torchrun's variables, and the rank's coordinates in the mesh. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from meshwright.api import labels
from meshwright.layout import Layout
from meshwright.protocol.messages import MeshDocument, MeshMember, ReplicaGroup, ReplicaGroups
from meshwright.protocol.run_config import CommandRun, NativeRun, Run
from meshwright_worker.agent.settings import Settings
from meshwright_worker.command.saved_checkpoints import place_of
from meshwright_worker.rank.task import RankTask

COMMUNICATION_VARIABLE = re.compile(r"(NCCL|RCCL|OFI|FI|UCX|SHARP|GLOO|IBV|MLX5)_[A-Z0-9_]+")
"""Names that a mesh document may set."""


def rank_environment(document: MeshDocument, member: MeshMember, rank: int, settings: Settings) -> dict[str, str]:
    """Return the variables to set for `rank`, one of `member`'s ranks.

    Raises:
        ValueError: the run's degrees do not match the document's world size.
    """
    layout = _layout(document.run, document.world_size)
    return (
        _torchrun_variables(document, member, rank, settings.uid)
        | _mesh_variables(layout, rank)
        | {labels.ENV_GENERATION: str(document.generation)}
        | ({} if document.replica_groups is None else _replica_group_variables(document.replica_groups, rank))
        | _storage_variables(document, settings)
    )


def _torchrun_variables(document: MeshDocument, member: MeshMember, rank: int, run_id: str) -> dict[str, str]:
    """The variables that torchrun sets for a process, with their meaning there."""
    world = _world(document, rank)
    pod = world.members.index(member)
    number = _number(document, rank) - world.first_rank
    numbers = {
        "RANK": number,
        "WORLD_SIZE": world.size,
        "LOCAL_RANK": rank - member.first_rank,
        "LOCAL_WORLD_SIZE": member.ranks,
        "GROUP_RANK": pod,
        "NODE_RANK": pod,
        "GROUP_WORLD_SIZE": len(world.members),
        "ROLE_RANK": number,
        "ROLE_WORLD_SIZE": world.size,
        "MASTER_PORT": world.port,
        "TORCHELASTIC_RESTART_COUNT": document.generation - 1,
    }
    if document.max_restarts is not None:
        numbers["TORCHELASTIC_MAX_RESTARTS"] = document.max_restarts
    return {name: str(value) for name, value in numbers.items()} | {
        "MASTER_ADDR": world.address,
        "ROLE_NAME": "default",
        "TORCHELASTIC_RUN_ID": run_id,
        # Rank 0 hosts the store, as with torchrun when no agent does.
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        # Without it torch reuses a store across restarts and reads the previous generation's keys.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }


def _number(document: MeshDocument, rank: int) -> int:
    """The number that the command's framework expects for a rank, so that the rank gets its coordinates there too."""
    run = document.run
    by_stage = isinstance(run, CommandRun) and run.stages_outermost
    return _layout(run, document.world_size).rank_by_stage(rank) if by_stage else rank


def _mesh_variables(layout: Layout, rank: int) -> dict[str, str]:
    """The sizes of the mesh's dimensions, and the rank's coordinates."""
    where = layout.coordinates(rank)
    numbers = {
        labels.ENV_TENSOR_SIZE: layout.tensor,
        labels.ENV_TENSOR_RANK: where.tensor,
        labels.ENV_PIPELINE_SIZE: layout.pipeline,
        labels.ENV_PIPELINE_RANK: where.pipeline,
        labels.ENV_CONTEXT_SIZE: layout.context,
        labels.ENV_CONTEXT_RANK: where.context,
        labels.ENV_DATA_SIZE: layout.data,
        labels.ENV_DATA_RANK: where.data,
    }
    return {name: str(value) for name, value in numbers.items()}


def _storage_variables(document: MeshDocument, settings: Settings) -> dict[str, str]:
    """Where checkpoints and data are, and the checkpoint to resume from."""
    found = {
        labels.ENV_CHECKPOINT_URI: settings.checkpoint_uri,
        labels.ENV_CHECKPOINT_DIR: settings.checkpoint_dir,
        labels.ENV_DATA_DIR: settings.data_dir,
    }
    variables = {name: value for name, value in found.items() if value}
    if document.resume is not None:
        variables |= {
            # Agents before 0.2 reported a relative path as it was.
            labels.ENV_RESUME_PATH: place_of(settings.checkpoint_dir, document.resume.path),
            labels.ENV_RESUME_STEP: str(document.resume.step),
        }
    return variables


@dataclass(frozen=True, slots=True)
class World:
    """The ranks that form one world: all of a generation, or those of a replica group."""

    first_rank: int
    size: int
    members: list[MeshMember]
    """The workers that have them."""
    address: str
    port: int


def _world(document: MeshDocument, rank: int) -> World:
    group, groups = own_group(document, rank), document.replica_groups
    if group is None or groups is None:
        return World(0, document.world_size, document.members, document.master_address, document.master_port)
    first = rank - rank % groups.ranks
    members = [member for member in document.members if first <= member.first_rank < first + groups.ranks]
    return World(first, groups.ranks, members, group.master_address, group.master_port)


def own_group(document: MeshDocument, rank: int) -> ReplicaGroup | None:
    """The replica group of a rank. None if all ranks form one world."""
    groups = document.replica_groups
    return None if groups is None else groups.groups[rank // groups.ranks]


def _replica_group_variables(groups: ReplicaGroups, rank: int) -> dict[str, str]:
    """What scripts with torchft read. `workers.env` has the lighthouse's address if no agent runs it."""
    variables = {"REPLICA_GROUP_ID": str(rank // groups.ranks), "NUM_REPLICA_GROUPS": str(len(groups.groups))}
    return {**variables, **({labels.ENV_LIGHTHOUSE: f"http://{groups.lighthouse}"} if groups.lighthouse else {})}


def communication_variables(document: MeshDocument, pod: Mapping[str, str]) -> dict[str, str]:
    """Return the document's variables of communication libraries that the pod's environment does not have.

    The user's `workers.env` and the image are in the pod's environment. A name of another kind, which only a damaged
    document has, is left out.
    """
    return {
        name: value
        for name, value in (document.environment or {}).items()
        if name not in pod and COMMUNICATION_VARIABLE.fullmatch(name) and "\0" not in value
    }


def resolve_script_paths(command: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    """Return the command with paths below the scripts' mount replaced by their real location.

    A word that names the variable of the checkpoints' directory, as in the flags of `runtime.framework`, is replaced by
    the directory.

    In a container the two are equal. Without containers, paths are passed only in environment variables, while the
    command, which comes from the coordinator, uses the mount's path.
    """
    where = environment.get(labels.ENV_SCRIPTS_DIR, labels.SCRIPTS_MOUNT)
    mount = labels.SCRIPTS_MOUNT
    words = {f"${name}": environment[name] for name in (labels.ENV_CHECKPOINT_DIR,) if name in environment}
    command = [words.get(argument, argument) for argument in command]
    return [
        where + argument.removeprefix(mount) if f"{argument}/".startswith(f"{mount}/") else argument
        for argument in command
    ]


def rank_task(
    document: MeshDocument, run: NativeRun, member: MeshMember, rank: int, settings: Settings
) -> RankTask[NativeRun]:
    """Build the task of `rank` for the built-in runtime; `run` is the document's."""
    return RankTask(
        run=run,
        generation=document.generation,
        rank=rank,
        world_size=document.world_size,
        local_rank=rank - member.first_rank,
        local_world_size=member.ranks,
        worker=settings.worker,
        master_address=document.master_address,
        master_port=document.master_port,
        pod_address=settings.pod_address,
        checkpoint_dir=settings.checkpoint_dir,
        checkpoint_uri=settings.checkpoint_uri,
        data_dir=settings.data_dir,
        in_memory=bool(document.in_memory),
        job=f"{settings.namespace}/{settings.job}",
        image=document.image,
        history=document.history,
        node_check=bool(document.node_check),
        copies=document.copies,
        memory=document.memory,
    )


def stages_of(run: Run, ranks: Iterable[int]) -> dict[int, int]:
    """The stages of the pipeline of these ranks. None if the degrees contradict each other: then no rank starts."""
    try:
        layout = run.layout
        return {rank: layout.coordinates(rank).pipeline for rank in ranks}
    except ValueError:
        return {}


def _layout(run: Run, world_size: int) -> Layout:
    layout = run.layout
    if layout.world_size != world_size:
        raise ValueError(f"the run's degrees make {layout.world_size} ranks, but the mesh has {world_size}")
    return layout
