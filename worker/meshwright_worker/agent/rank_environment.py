"""The environment of a rank's process: torchrun's variables, and the rank's coordinates in the mesh. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from meshwright.api import labels
from meshwright.layout import Layout
from meshwright.protocol.messages import MeshDocument, MeshMember
from meshwright.protocol.run_config import NativeRun, Run
from meshwright_worker.agent.settings import Settings
from meshwright_worker.rank.task import RankTask

COMMUNICATION_VARIABLE = re.compile(r"(NCCL|RCCL|OFI|FI|UCX|SHARP|GLOO|IBV|MLX5)_[A-Z0-9_]+")
"""Names that a mesh document may set."""


def rank_environment(document: MeshDocument, member: MeshMember, rank: int, settings: Settings) -> dict[str, str]:
    """Return the variables to set for `rank`, one of `member`'s ranks.

    Raises:
        ValueError: the run's degrees do not match the document's world size.
    """
    layout = _layout(document.run, document.world_size)
    where = layout.coordinates(rank)
    group = document.members.index(member)
    numbers = {
        "RANK": rank,
        "WORLD_SIZE": document.world_size,
        "LOCAL_RANK": rank - member.first_rank,
        "LOCAL_WORLD_SIZE": member.ranks,
        "GROUP_RANK": group,
        "NODE_RANK": group,
        "GROUP_WORLD_SIZE": len(document.members),
        "ROLE_RANK": rank,
        "ROLE_WORLD_SIZE": document.world_size,
        "MASTER_PORT": document.master_port,
        "TORCHELASTIC_RESTART_COUNT": document.generation - 1,
        labels.ENV_GENERATION: document.generation,
        labels.ENV_TENSOR_SIZE: layout.tensor,
        labels.ENV_TENSOR_RANK: where.tensor,
        labels.ENV_PIPELINE_SIZE: layout.pipeline,
        labels.ENV_PIPELINE_RANK: where.pipeline,
        labels.ENV_CONTEXT_SIZE: layout.context,
        labels.ENV_CONTEXT_RANK: where.context,
        labels.ENV_DATA_SIZE: layout.data,
        labels.ENV_DATA_RANK: where.data,
    }
    environment = {name: str(value) for name, value in numbers.items()}
    environment |= {
        "MASTER_ADDR": document.master_address,
        "ROLE_NAME": "default",
        "TORCHELASTIC_RUN_ID": settings.uid,
        # Rank 0 hosts the store, as with torchrun when no agent does.
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        # Without it torch reuses a store across restarts and reads the previous generation's keys.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }
    if document.max_restarts is not None:
        environment["TORCHELASTIC_MAX_RESTARTS"] = str(document.max_restarts)
    if document.resume is not None:
        environment[labels.ENV_RESUME_PATH] = document.resume.path
        environment[labels.ENV_RESUME_STEP] = str(document.resume.step)
    if settings.checkpoint_uri:
        environment[labels.ENV_CHECKPOINT_URI] = settings.checkpoint_uri
    if settings.checkpoint_dir:
        environment[labels.ENV_CHECKPOINT_DIR] = settings.checkpoint_dir
    if settings.data_dir:
        environment[labels.ENV_DATA_DIR] = settings.data_dir
    return environment


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


def _layout(run: Run, world_size: int) -> Layout:
    layout = run.layout
    if layout.world_size != world_size:
        raise ValueError(f"the run's degrees make {layout.world_size} ranks, but the mesh has {world_size}")
    return layout
