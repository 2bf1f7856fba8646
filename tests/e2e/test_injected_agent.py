"""`runtime.agent: Injected`: images that contain nothing of Meshwright run, lose a pod, and resume."""

from __future__ import annotations

import asyncio
import shutil

import pytest

from meshwright.api.labels import API_VERSION, KIND
from meshwright_local.kube.resources import JOBS
from tests.e2e.images import agent_image, static_image, torch_image
from tests.e2e.local_stack import AGENT_IMAGE, NAMESPACE
from tests.e2e.test_command_line import run

pytestmark = [pytest.mark.long, pytest.mark.skipif(shutil.which("gcc") is None, reason="gcc builds the static program")]

STATIC_STEPS = 60
TORCH_STEPS = 30
TORCH = """
import importlib.util, os, signal, sys, time
stop = []
signal.signal(signal.SIGTERM, lambda *_: stop.append(1))
import torch, torch.distributed as dist
assert not any(importlib.util.find_spec(name) for name in ("meshwright", "meshwright_worker", "pydantic", "aiohttp"))
dist.init_process_group("gloo")
where = os.path.join(os.environ["MESHWRIGHT_CHECKPOINT_DIR"], "state.pt")
os.makedirs(os.path.dirname(where), exist_ok=True)
weight, step = torch.zeros(8), 0
if os.path.exists(where):
    step, weight = torch.load(where)
start = step
print(f"resumed after step {step}", flush=True)
while step < STEPS:
    flag = torch.tensor(len(stop))
    dist.all_reduce(flag)
    if flag:
        if dist.get_rank() == 0:
            torch.save((step, weight), where + ".new")
            os.replace(where + ".new", where)
        sys.exit(143)
    time.sleep(0.1)
    if start == 0 and step >= 12:  # until it has been restarted once
        continue
    gradient = weight - 1 + 0.1 * dist.get_rank()
    dist.all_reduce(gradient)
    weight -= 0.02 * gradient
    step += 1
    if dist.get_rank() == 0:
        print(f"step {step}/STEPS loss: {(weight - 0.95).square().sum():.6f}", flush=True)
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
    static = await stage.until("static", lambda s: s.checkpoint is not None and s.checkpoint.step == 30, "at step 30")
    plain = await stage.until("plain", lambda s: (s.step or 0) >= 12, "at step 12", 300)
    # Told apart: each has its own steps, length, checkpoint and nodes.
    assert (static.step, static.total_steps) == (30, STATIC_STEPS)
    assert (plain.step, plain.total_steps) == (12, TORCH_STEPS)
    uid = (await stage.client.get(JOBS, "static", NAMESPACE))["metadata"]["uid"]
    path = f"/meshwright/checkpoints/static-{uid[:8]}/step"
    assert (static.checkpoint.step, static.checkpoint.path) == (30, path)
    assert plain.checkpoint is None
    assert len(static.placement.workers) == len(plain.placement.workers) == 2
    listed = (await run(stage, "list")).out
    assert "static" in listed
    assert "plain" in listed
    # The static program's pod is killed without a warning, that of torch is asked to save first.
    await stage.delete_pod("static", 1, 0)
    await stage.delete_pod("plain", 1)
    static, plain = await stage.complete("static", 300), await stage.complete("plain", 300)
    assert (static.step, plain.step) == (STATIC_STEPS, TORCH_STEPS)
    for status in (static, plain):
        assert [(restart.cause, restart.count) for restart in status.restarts] == [("PodLost", 1)]
    assert float(static.loss) == pytest.approx(4 - 0.01 * STATIC_STEPS)
    text = await stage.log("static-w0-0")
    assert text.count("rank 0 of 2 starts after step 0") == text.count("rank 0 of 2 starts after step 30") == 1
    text = await stage.log("plain-w0-0")
    assert text.count("resumed after step 0") == text.count("resumed after step 12") == 1
