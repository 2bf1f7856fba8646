"""The current version serves what every released version wrote: no restart, no write, no file that cannot be read.

If a test fails here, change the code, not the recording: clusters contain these objects.
"""

from __future__ import annotations

import asyncio
import copy
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from meshwright.api.objects import KubeObject
from meshwright.data.files import LocalDirectory, open_directory
from meshwright.data.shards import TokenShards
from meshwright.data.verify_shards import verify
from meshwright.protocol.messages import AgentState, parse_mesh_document
from meshwright.protocol.run_config import NativeRun
from meshwright_operator.controller.http_server import serve_application
from meshwright_operator.kube.pod_info import read_pod
from meshwright_operator.settings import Address
from meshwright_operator.timestamps import parse_time
from meshwright_worker.checkpoint.directory import CheckpointDirectory
from meshwright_worker.checkpoint.full_tensors import FullTensorReader, find_checkpoint
from tests.compatibility import record
from tests.operator.world import World

ROOT = Path(__file__).parent
CHART = ROOT.parents[1] / "helm" / "meshwright"
HELM = os.environ.get("HELM") or shutil.which("helm")
RELEASES = sorted(path.name for path in ROOT.iterdir() if path.is_dir() and path.name[0].isdigit())


@pytest.fixture(params=RELEASES)
def release(request: pytest.FixtureRequest) -> Path:
    """The directory of a released version."""
    return ROOT / str(request.param)


def recorded_cluster(release: Path) -> World:
    """The cluster of that release, with an operator of the current version that has just started."""
    recorded = json.loads((release / "cluster.json").read_text())
    world = World(seed=1, nodes=0, gpus=recorded["gpus"], work=float(record.STEPS))
    world.cluster.watchers.clear()
    now = parse_time(recorded["now"])
    assert now is not None
    world.now, world.nodes = now, recorded["nodes"]
    world.cluster.objects = recorded["objects"]
    world.cluster._version = max(int(obj["metadata"].get("resourceVersion", 0)) for obj in recorded["objects"].values())
    for obj in world.cluster.of("pods"):
        pod = read_pod(obj)
        assert pod is not None, obj["metadata"]["name"]
        if (entry := recorded["agents"].get(pod.name)) is not None:
            agent = world.agent(pod, entry["address"])
            agent.generation, agent.trained, agent.hung = entry["generation"], entry["trained"], True
            agent.state = AgentState(entry["state"])
            world.agents[pod.name] = agent
    world.operators = [world.operator()]
    world.cluster.writes = 0
    return world


def jobs(world: World) -> dict[str, KubeObject]:
    return {obj["metadata"]["name"]: obj for obj in world.cluster.of("paralleltrainingjobs")}


async def test_no_object_is_written_and_no_pod_deleted(release: Path) -> None:
    world = recorded_cluster(release)
    before = copy.deepcopy(world.cluster.objects)
    await world.run(60)
    changed = [path for path, obj in before.items() if world.cluster.objects.get(path) != obj]
    # Nothing of a job that waits is running yet: its plan is that of this version.
    assert [path for path in changed if not path.endswith("/paralleltrainingjobs/waiting")] == []
    assert sorted(world.cluster.objects) == sorted(before)
    assert world.cluster.writes == len(changed)
    assert world.started == []


async def test_a_lost_pod_is_replaced_as_its_peers_were_created(release: Path) -> None:
    world = recorded_cluster(release)
    lost = world.pods("running")[0]
    old = copy.deepcopy(next(obj for obj in world.cluster.of("pods") if obj["metadata"]["name"] == lost.name))
    before = {pod.name for pod in world.pods("running")}
    world.crash(lost.name)
    await world.run(60)
    after = {pod.name: pod for pod in world.pods("running")}
    assert len(after) == len(before)
    assert before - set(after) == {lost.name}
    (new,) = set(after) - before
    assert {pod.revision for pod in after.values()} == {lost.revision}
    obj = next(obj for obj in world.cluster.of("pods") if obj["metadata"]["name"] == new)
    for field in ("image", "resources"):
        assert obj["spec"]["containers"][0].get(field) == old["spec"]["containers"][0].get(field)
    assert world.true("running", "Ready")


async def test_a_suspended_job_resumes_and_a_finished_one_stays(release: Path) -> None:
    world = recorded_cluster(release)
    generation = world.status("suspended")["mesh"]["generation"]
    # After two minutes in the queue, the waiting job reserves the nodes that this one needs.
    world.cluster.remove(next(path for path in world.cluster.objects if path.endswith("/paralleltrainingjobs/waiting")))
    job = world.cluster.objects[next(p for p in world.cluster.objects if p.endswith("/paralleltrainingjobs/suspended"))]
    job["spec"]["suspend"] = False
    job["metadata"]["generation"] += 1
    world.operators[0].relist()
    await world.run(60)
    assert world.status("suspended")["mesh"]["generation"] == generation + 1
    assert world.true("finished", "Complete")
    assert all(pod.terminal for pod in world.pods("finished"))


async def test_the_requests_of_an_agent_are_answered(release: Path) -> None:
    world = recorded_cluster(release)
    await world.run(5)
    coordinator = world.operators[0].coordinator
    coordinator.synced = True
    coordinator._authenticator.session = record.SESSION
    async with serve_application(coordinator.application(), Address("127.0.0.1", 0)) as port:
        for name in ("poll", "report"):
            status, body = await send(port, (release / "agent" / f"{name}.http").read_bytes())
            assert status == 200, (name, status, body)
            if name == "poll":
                assert parse_mesh_document(body) == parse_mesh_document(document_of(release))
            else:
                assert json.loads(body)["generation"] == world.status("running")["mesh"]["generation"]


def document_of(release: Path) -> bytes:
    return (release / "agent" / "mesh-document.json").read_bytes()


async def send(port: int, request: bytes) -> tuple[int, bytes]:
    """Status and body of the response to a request as it was on the network."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(request)
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        lengths = [line.split(":")[1] for line in head.splitlines() if line.lower().startswith("content-length")]
        body = await reader.readexactly(int(lengths[0])) if lengths else b""
        return int(head.split()[1]), body
    finally:
        writer.close()


def test_a_mesh_document_is_read(release: Path) -> None:
    document = parse_mesh_document(document_of(release))
    raw = json.loads(document_of(release))
    assert isinstance(document.run, NativeRun)
    assert (document.generation, document.world_size) == (raw["generation"], raw["worldSize"])
    assert [member.address for member in document.members] == [member["address"] for member in raw["members"]]


def test_checkpoints_are_loaded_bit_for_bit(release: Path) -> None:
    root = release / "checkpoints"
    hashes = json.loads((root / "tensors.json").read_text())
    assert CheckpointDirectory(root).steps() == [6, 3]
    path, manifest = find_checkpoint(root)
    assert (manifest.state.step, manifest.architecture) == (6, record.ARCHITECTURE)
    reader = FullTensorReader(path)
    assert {name: record.tensor_hash(reader.read(name)) for name in reader.names} == hashes


def test_token_shards_are_read(release: Path) -> None:
    root = release / "tokens"
    shards = TokenShards(LocalDirectory(root))
    assert shards.tokens(0, len(shards)).tolist() == json.loads((root / "tokens.json").read_text())
    assert verify(open_directory(str(root)))[1] == []


def test_values_of_the_chart_still_have_an_effect(release: Path) -> None:
    recorded, current = (yaml.safe_load(path.read_text()) for path in (release / "values.yaml", CHART / "values.yaml"))
    assert unknown(recorded, current) == []


@pytest.mark.skipif(HELM is None, reason="no helm on the PATH and none named by HELM")
def test_the_chart_renders_with_recorded_values(release: Path) -> None:
    command = [str(HELM), "template", "mw", str(CHART), "--namespace", "ops", "--kube-version", "1.31.0"]
    result = subprocess.run(
        [*command, "--values", str(release / "values.yaml")], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr


def unknown(recorded: Any, current: Any, path: str = "") -> list[str]:
    """The values that the current chart does not have. Values of an empty map are free."""
    if not isinstance(recorded, dict) or not isinstance(current, dict) or not current:
        return []
    missing = [f"{path}{key}" for key in recorded if key not in current]
    return missing + [
        name
        for key in recorded.keys() & current.keys()
        for name in unknown(recorded[key], current[key], f"{path}{key}.")
    ]


@pytest.mark.slow
def test_a_recording_depends_only_on_the_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two recordings of the same code are equal, byte for byte."""
    contents = []
    for name in ("one", "two"):
        monkeypatch.setattr(record, "ROOT", tmp_path)
        record.main(name)
        root = tmp_path / name
        contents.append({str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()})
    assert contents[0].keys() == contents[1].keys()
    assert [name for name in contents[0] if contents[0][name] != contents[1][name]] == []
    assert sum(map(len, contents[0].values())) < 1 << 20
