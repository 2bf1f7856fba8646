"""Records what the current version writes: `python -m tests.compatibility.record [VERSION]`, once for each release.

The result depends only on the code: times, names and random numbers are fixed.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import shutil
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from meshwright.api.objects import KubeObject
from meshwright.data.shards import ShardWriter
from meshwright.models.architecture import Architecture
from meshwright.protocol.json_schema import protocol_schema
from meshwright.protocol.messages import MeshRequest
from meshwright.rules.revision import revision_of_fields
from meshwright_operator.controller import status_patch
from meshwright_operator.coordinator.tokens import Tokens
from meshwright_operator.timestamps import format_time
from meshwright_worker.agent.coordinator_client import CoordinatorClient, UnavailableError
from meshwright_worker.agent.settings import Settings
from meshwright_worker.checkpoint.directory import CheckpointDirectory
from meshwright_worker.checkpoint.manifest import LayoutRecord, Manifest, TrainingState
from tests.operator.support import JOBS, job
from tests.operator.world import World
from tests.rules.test_revision import SPECS
from tests.worker.checkpoint.saving import save_alone

ROOT = Path(__file__).parent
VALUES = ROOT.parents[1] / "helm" / "meshwright" / "values.yaml"
RELEASE = "0.1.0"
KEY = b"k" * 32
"""The operator's key in a `World`."""
SESSION = "recorded-session"
"""The session of the coordinator that the agent's requests are signed for."""
STEPS = 10**6
ARCHITECTURE = Architecture(layers=1, hidden_size=8, intermediate_size=8, heads=2, kv_heads=2, vocab_size=257)
DOCUMENTS = [[1, 2, 3], [4], [], [5, 6, 7, 8]]


def main(release: str = RELEASE) -> None:
    """Write everything below the directory of the release."""
    directory = ROOT / release
    shutil.rmtree(directory, ignore_errors=True)
    (directory / "agent").mkdir(parents=True)
    # Progress is throttled by the real clock: without that, the number of writes does not depend on this machine.
    with patch.object(status_patch, "PROGRESS_SECONDS", 0.0):
        world = asyncio.run(recorded_world())
    _write(directory / "cluster.json", cluster(world))
    asyncio.run(_record_agent(directory / "agent", world))
    (directory / "agent" / "protocol.schema.json").write_text(protocol_schema(), encoding="utf-8")
    _record_checkpoints(directory / "checkpoints")
    _record_tokens(directory / "tokens")
    shutil.copy(VALUES, directory / "values.yaml")
    shutil.copytree(VALUES.parent, directory / "chart")
    _write(directory / "revisions.json", [revision_of_fields(spec) for spec in SPECS])
    print(f"{directory}: {sum(path.stat().st_size for path in directory.rglob('*') if path.is_file())} bytes")


async def recorded_world() -> World:
    """A cluster with a job in every state, in which nothing changes any more."""
    world = World(seed=7, nodes=5, gpus=4, work=20.0)
    training = {"steps": STEPS, "globalBatchSize": 24, "sequenceLength": 64}
    world.submit(job("finished", training=training))
    await world.run(60)
    world.work = float(STEPS)
    world.submit(job("running", training=training, checkpoint={"claimName": "volume", "everySteps": 10}))
    world.submit(job("suspended", training=training))
    command = job("command", replicas=1, parallelism={"tensor": 2}, runtime={"command": ["python", "train.py"]})
    for field in ("model", "data", "training"):
        del command["spec"][field]
    world.submit(command)
    await world.run(40)
    suspended = world.cluster.objects[f"{JOBS}/suspended"]
    suspended["spec"]["suspend"] = True
    suspended["metadata"]["generation"] += 1
    world.cluster.update(f"{JOBS}/suspended", suspended)
    world.submit(job("waiting", replicas=8, training={**training, "globalBatchSize": 64}))
    world.crash(next(pod.name for pod in world.pods("running")))  # so that incarnations and generations differ
    await world.run(60)
    for agent in world.agents.values():
        agent.hung = True  # no progress, so that no status changes
    await world.run(30)
    # Another process, which has placed nothing and waits for nothing: what it writes does not change any more.
    world.cluster.watchers.clear()
    world.operators = [world.operator()]
    await world.run(30)
    return world


def cluster(world: World) -> KubeObject:
    """All that an operator finds when it starts, and the state of the agents."""
    agents = {
        name: {"generation": agent.generation, "state": agent.state.value, "trained": agent.trained}
        | {"address": agent.address}
        for name, agent in world.agents.items()
    }
    return {
        "now": format_time(world.now),
        "gpus": world.gpus,
        "nodes": world.nodes,
        "objects": dict(sorted(world.cluster.objects.items())),
        "agents": dict(sorted(agents.items())),
    }


async def _record_agent(directory: Path, world: World) -> None:
    """The requests of the agent of the running job's first worker, as they are on the network."""
    pod = min(world.pods("running"), key=lambda pod: pod.worker)
    agent = world.agents[pod.name]
    requests: dict[str, bytes] = {}

    async def receive(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = re.search(rb"(?i)content-length: (\d+)", head)
        body = await reader.readexactly(int(length[1])) if length else b""
        name = "poll" if b"/mesh " in head else "report"
        requests[name] = re.sub(rb"(?i)host: [^\r]+", b"Host: coordinator", head) + body
        writer.write(b"HTTP/1.1 503 Unavailable\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(receive, "127.0.0.1", 0)
    settings = Settings(
        namespace=pod.namespace,
        job=pod.job,
        uid=pod.owner,
        worker=pod.worker,
        incarnation=pod.incarnation,
        pod_address=agent.address,
        coordinator_url=f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}",
        token=Tokens(KEY).token(pod.namespace, pod.job, pod.owner),
        pod_uid=pod.uid,
    )
    hello = MeshRequest(
        worker=pod.worker,
        incarnation=pod.incarnation,
        pod_uid=pod.uid,
        generation=agent.generation - 1,
        address=agent.address,
        store_port=20000,
        wait_seconds=1.0,
    )
    async with server, CoordinatorClient(settings) as client:
        client._signer._session = SESSION
        with suppress(UnavailableError):
            await client.mesh(hello)
        with suppress(UnavailableError):
            await client.report(agent.report())
    for name, content in sorted(requests.items()):
        (directory / f"{name}.http").write_bytes(content)
    document = world.operators[0].coordinator.registry(pod.owner).document
    assert document is not None
    _write(directory / "mesh-document.json", document.wire())


def checkpoint_tensors() -> dict[str, torch.Tensor]:
    """Tensors of several types and shapes, of which none needs a random number."""
    return {
        "layers.0.weight": torch.arange(64, dtype=torch.float32).reshape(8, 8) / 7,
        "layers.0.bias": (torch.arange(8, dtype=torch.float32) / 3).to(torch.bfloat16),
        "optimizer.step": torch.tensor(3, dtype=torch.int64),
    }


def _record_checkpoints(root: Path) -> None:
    directory = CheckpointDirectory(root)
    for step in (3, 6):
        manifest = Manifest(
            state=TrainingState(step=step, samples=step * 8, digest=(1 << 63) - step, loss=(1 / step).hex()),
            architecture=ARCHITECTURE,
            seed=0,
            sequence_length=8,
            stream="recorded",
            layout=LayoutRecord(tensor=1, pipeline=1, data=1, zero_stage=0),
        )
        hidden = directory.prepare(step)
        save_alone(
            checkpoint_tensors(),
            hidden,
            lambda files, manifest=manifest: directory.commit(manifest.model_copy(update={"files": files})),
        )
    _write(root / "tensors.json", {name: tensor_hash(tensor) for name, tensor in checkpoint_tensors().items()})


def tensor_hash(tensor: torch.Tensor) -> str:
    """Type, shape and bytes of a tensor as a hash."""
    content = tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(f"{tensor.dtype} {list(tensor.shape)} ".encode() + content).hexdigest()


def _record_tokens(directory: Path) -> None:
    writer = ShardWriter(directory, "byte", 257, 256, shard=4)
    for document in DOCUMENTS:
        writer.add([document])
    writer.close()
    _write(directory / "tokens.json", [token for document in DOCUMENTS for token in [*document, 256]])


def _write(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:2])
