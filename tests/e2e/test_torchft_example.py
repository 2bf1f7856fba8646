"""Replica groups of torchft, each a job: one loses its pod, restarts alone, and copies its state from the other one."""

from __future__ import annotations

import asyncio
import os
import random
from pathlib import Path

import pytest
import yaml

from meshwright.api.labels import KIND
from meshwright_local.kube.resources import PODS
from tests.e2e import framework_numbers as numbers
from tests.e2e import framework_runs as runs
from tests.e2e.local_stack import NAMESPACE, eventually
from tests.e2e.test_framework_examples import STEPS, interpreter
from tests.patience import patient

pytestmark = [pytest.mark.long, pytest.mark.timeout(3600)]
EXAMPLE, GROUPS, LOST_AFTER = "torchft", 2, 12
SECONDS = 300
"""How long groups wait for each other, on a busy machine."""


def objects(python: str, address: str) -> list[dict]:
    """The jobs of the example and its script, which find the lighthouse at an address: there is no DNS here."""
    items = [item for item in yaml.safe_load_all((runs.DIRECTORY / EXAMPLE / "job.yaml").read_text())]
    jobs = [item for item in items if item["kind"] == KIND]
    for job in jobs:
        wanted = {**runs.ENVIRONMENT, "TORCHFT_LIGHTHOUSE": address, "PAUSE": "0.4", "TORCHFT_PATIENCE": str(SECONDS)}
        own = [one for one in job["spec"]["workers"]["env"] if one["name"] not in wanted]
        job["spec"]["workers"]["env"] = own + [{"name": key, "value": value} for key, value in wanted.items()]
        job["spec"]["runtime"]["command"][0] = python
    script = {"train.py": (runs.DIRECTORY / EXAMPLE / "train.py").read_text()}
    return [{"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": EXAMPLE}, "data": script}, *jobs]


def lighthouse(python: str, port: int) -> dict:
    """The example's Deployment, with the program of the interpreter's environment."""
    items = yaml.safe_load_all((runs.DIRECTORY / EXAMPLE / "job.yaml").read_text())
    deployment = next(item for item in items if item["kind"] == "Deployment")
    command = deployment["spec"]["template"]["spec"]["containers"][0]["command"]
    command[0], command[-1] = str(Path(python).parent / command[0]), f"[::]:{port}"
    return deployment


async def undisturbed(python: str) -> str:
    """The output of group 0 when nothing disturbs the groups, without a cluster."""
    light, *ports = random.sample(range(20000, 29000), 1 + GROUPS)
    processes = [
        await asyncio.create_subprocess_exec(
            *(str(Path(python).parent / "torchft_lighthouse"), "--min_replicas", str(GROUPS), "--join_timeout_ms"),
            *("10000", "--bind", f"[::]:{light}"),
            stderr=asyncio.subprocess.DEVNULL,
        )
    ]
    shared = {
        **{key: value for key, value in os.environ.items() if not key.startswith("MESHWRIGHT_")},
        **runs.ENVIRONMENT,
        **{"STEPS": str(STEPS), "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"},
        **{"MASTER_ADDR": "127.0.0.1", "TORCHFT_LIGHTHOUSE": f"http://127.0.0.1:{light}"},
        **{"LEAST_GROUPS": str(GROUPS), "TORCHFT_PATIENCE": str(SECONDS)},
    }
    try:
        for group, port in enumerate(ports):
            processes.append(
                await asyncio.create_subprocess_exec(
                    python,
                    str(runs.DIRECTORY / EXAMPLE / "train.py"),
                    env={**shared, "REPLICA_GROUP": str(group), "MASTER_PORT": str(port)},
                    stdout=asyncio.subprocess.PIPE,
                    stderr=asyncio.subprocess.DEVNULL,
                )
            )
        outputs = await asyncio.wait_for(
            asyncio.gather(*(process.communicate() for process in processes[1:])), patient(600)
        )
    finally:
        for process in processes:
            if process.returncode is None:
                process.kill()
    return outputs[0][0].decode()


async def test_a_replica_group_loses_its_pod_and_copies_the_state_of_the_other(stage):
    python = interpreter(EXAMPLE)
    expected = await undisturbed(python)
    port = random.randint(20000, 29000)
    await stage.apply([lighthouse(python, port)])

    async def address():
        pods = (await stage.client.list(PODS, NAMESPACE, label_selector="app=torchft-lighthouse")).items
        return next((pod["status"]["podIP"] for pod in pods if pod.get("status", {}).get("phase") == "Running"), None)

    await stage.apply(objects(python, f"http://{await eventually('the lighthouse runs', address)}:{port}"))
    async with numbers.History(stage, "torchft-0") as history:
        await stage.trained("torchft-1", LOST_AFTER, seconds=600)
        await stage.delete_pod("torchft-1", 0, grace_seconds=0)
        stayed, came_back = [await stage.complete(f"torchft-{group}", seconds=900) for group in range(GROUPS)]
    first, second = [
        await stage.log((await stage.pod(f"torchft-{group}", 0))["metadata"]["name"]) for group in range(GROUPS)
    ]
    assert not stayed.restarts, "the other group trained on in its processes"
    assert {restart.cause for restart in came_back.restarts} == {"PodLost"}
    assert runs.resumed_after(second) >= LOST_AFTER, "it copied the state: there is no checkpoint"
    assert numbers.losses(first) == numbers.losses(expected), "the loss of every step is exact"
    later = {step: loss for step, loss in numbers.losses(first).items() if step > runs.resumed_after(second)}
    assert numbers.losses(second) == later
    assert first.split("final loss")[1] == second.split("final loss")[1], "both groups have the same parameters"
    numbers.compare(history.shown, first)
    runs.record(
        runs.Result(
            EXAMPLE, EXAMPLE, runs.pins(EXAMPLE), f"{runs.what_runs(first)}, {GROUPS} groups", GROUPS,
            runs.resumed_after(second), runs.final_loss(expected), runs.final_loss(second),
        )
    )  # fmt: skip
