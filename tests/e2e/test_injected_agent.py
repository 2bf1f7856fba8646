"""`runtime.agent: Injected`: images that contain nothing of Meshwright run, lose a pod, and resume."""

from __future__ import annotations

import asyncio
import shutil

import pytest

from meshwright.api.labels import API_VERSION, KIND
from tests.e2e.images import agent_image, static_image, torch_image
from tests.e2e.local_stack import AGENT_IMAGE, eventually, holds
from tests.e2e.test_command_line import run

pytestmark = [pytest.mark.long, pytest.mark.skipif(shutil.which("gcc") is None, reason="gcc builds the static program")]

STATIC_STEPS = 400
TORCH_STEPS = 60
TORCH = """
import importlib.util, os, signal, sys, time
import torch, torch.distributed as dist
assert not any(importlib.util.find_spec(name) for name in ("meshwright", "meshwright_worker", "pydantic", "aiohttp"))
stop = []
signal.signal(signal.SIGTERM, lambda *_: stop.append(1))
dist.init_process_group("gloo")
where = os.path.join(os.environ["MESHWRIGHT_CHECKPOINT_DIR"], "state.pt")
os.makedirs(os.path.dirname(where), exist_ok=True)
torch.manual_seed(dist.get_rank())
weight, step = torch.zeros(8), 0
if os.path.exists(where):
    step, weight = torch.load(where)
print(f"resumed after step {step}", flush=True)
while step < STEPS:
    gradient = weight - 1 + 0.1 * dist.get_rank()
    dist.all_reduce(gradient)
    weight -= 0.02 * gradient
    step += 1
    flag = torch.tensor(len(stop))
    dist.all_reduce(flag)
    if dist.get_rank() == 0 and (step % 5 == 0 or flag):
        torch.save((step, weight), where + ".new")
        os.replace(where + ".new", where)
    if dist.get_rank() == 0:
        print(f"step {step}/STEPS loss: {(weight - 0.95).square().sum():.9f}", flush=True)
    if flag:
        sys.exit(143)
    time.sleep(0.3)
dist.destroy_process_group()
""".replace("STEPS", str(TORCH_STEPS))


def objects(name, image, command):
    claim = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": name},
        "spec": {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}},
    }
    spec = {
        "replicas": 2,
        "runtime": {"command": command, "agent": "Injected"},
        "workers": {"image": image, "gpusPerWorker": 1, "terminationGracePeriodSeconds": 10},
        "checkpoint": {"claimName": name},
    }
    return [claim, {"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": name}, "spec": spec}]


async def test_images_with_nothing_of_ours_run_lose_a_pod_and_resume(stage):
    images = stage.directory / "cluster" / "images"
    await asyncio.gather(
        asyncio.to_thread(agent_image, images, AGENT_IMAGE),
        asyncio.to_thread(static_image, images, "trainer:static"),
        asyncio.to_thread(torch_image, images, "team/plain-torch:2"),
    )
    assert [path.name for path in (images / "trainer:static" / "rootfs").iterdir()] == ["trainer"]
    await stage.apply(objects("static", "trainer:static", ["/trainer", str(STATIC_STEPS)]))
    await stage.apply(objects("plain", "team/plain-torch:2", ["python", "-c", TORCH]))
    static = await stage.until("static", lambda s: (s.step or 0) >= 25, "past step 25")
    plain = await stage.until("plain", lambda s: (s.step or 0) >= 15, "past step 15", 300)
    # Told apart: each has its own nodes, steps and length.
    assert (static.total_steps, plain.total_steps) == (STATIC_STEPS, TORCH_STEPS)
    nodes = {name: {(await stage.pod(name, w))["spec"]["nodeName"] for w in (0, 1)} for name in ("static", "plain")}
    assert all(nodes.values())
    listed = (await run(stage, "list")).out
    assert "static" in listed
    assert "plain" in listed
    # The static program's pod is killed without a warning, that of torch is asked to save first.
    lost = await stage.delete_pod("static", 1, 0)
    drained = await stage.delete_pod("plain", 1)
    for name, pod in (("static", lost), ("plain", drained)):

        async def replaced(name=name, pod=pod):
            found = await stage.pod(name, 1)
            return found["metadata"]["name"] != pod and found["status"].get("phase") == "Running"

        await eventually(f"{name} has another pod", replaced)
    static, plain = await stage.complete("static", 300), await stage.complete("plain", 300)
    assert (static.step, plain.step) == (STATIC_STEPS, TORCH_STEPS)
    assert (static.restarts, plain.restarts) == (1, 1)
    assert float(static.loss) == pytest.approx(4 - 0.01 * STATIC_STEPS)
    texts = {name: await stage.log(f"{name}-w0-0") for name in ("static", "plain")}
    assert texts["static"].count("starts after step") == 2
    assert "starts after step 0" in texts["static"].partition("starts after step")[1] + texts["static"]
    resumed = [line for line in texts["static"].splitlines() if "starts after step" in line][-1]
    assert int(resumed.split()[-1]) >= 20
    assert [line for line in texts["plain"].splitlines() if "resumed after step" in line][-1].split()[-1] != "0"
    assert holds("Complete")(plain)
