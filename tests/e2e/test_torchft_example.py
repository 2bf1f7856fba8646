"""Replica groups of torchft in one job: one loses its pod, restarts alone, and copies its state from the other one."""

from __future__ import annotations

import asyncio
import os
import random
from pathlib import Path

import pytest
import yaml

from meshwright.api.labels import KIND
from tests.e2e import framework_numbers as numbers
from tests.e2e import framework_runs as runs
from tests.e2e.test_framework_examples import STEPS, interpreter
from tests.patience import patient

pytestmark = [pytest.mark.long, pytest.mark.timeout(3600)]
EXAMPLE, GROUPS, LOST_AFTER = "torchft", 2, 12
SECONDS = 300
"""How long groups wait for each other, on a busy machine."""


def objects(python: str) -> list[dict]:
    """The job of the example and its script. The agent of rank 0 runs the lighthouse."""
    (job,) = yaml.safe_load_all((runs.DIRECTORY / EXAMPLE / "job.yaml").read_text())
    assert (job["kind"], job["spec"]["runtime"]["framework"]) == (KIND, "TorchFT")
    wanted = {**runs.ENVIRONMENT, "PAUSE": "1.0", "TORCHFT_PATIENCE": str(SECONDS)}
    own = [one for one in job["spec"]["workers"]["env"] if one["name"] not in wanted]
    job["spec"]["workers"]["env"] = own + [{"name": key, "value": value} for key, value in wanted.items()]
    job["spec"]["runtime"]["command"][0] = python
    script = {"train.py": (runs.DIRECTORY / EXAMPLE / "train.py").read_text()}
    return [{"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": EXAMPLE}, "data": script}, job]


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
        **{"TORCHFT_MIN_REPLICAS": str(GROUPS), "TORCHFT_PATIENCE": str(SECONDS)},
    }
    try:
        for group, port in enumerate(ports):
            processes.append(
                await asyncio.create_subprocess_exec(
                    python,
                    str(runs.DIRECTORY / EXAMPLE / "train.py"),
                    env={**shared, "REPLICA_GROUP_ID": str(group), "MASTER_PORT": str(port)},
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
    await stage.apply(objects(python))
    async with numbers.History(stage, EXAMPLE) as history:
        await stage.trained(EXAMPLE, LOST_AFTER, seconds=600)
        await stage.delete_pod(EXAMPLE, 1, grace_seconds=0)
        status = await stage.complete(EXAMPLE, seconds=900)
    pods = [(await stage.pod(EXAMPLE, worker))["metadata"]["name"] for worker in range(GROUPS)]
    first, second = [await stage.log(pod) for pod in pods]
    assert [restart.cause for restart in status.restarts] == ["PodLost"]
    assert [group.since for group in status.mesh.replica_groups.groups] == [1, 2]
    assert first.count("resumed after step") == 1, "the other group trained on in its processes"
    assert "lighthouse of the replica groups started" in first
    assert runs.resumed_after(second) >= LOST_AFTER, "it copied the state: there is no checkpoint"
    assert numbers.losses(first) == numbers.losses(expected), "the loss of every step is exact"
    later = {step: loss for step, loss in numbers.losses(first).items() if step > runs.resumed_after(second)}
    assert numbers.losses(second) == later
    digests = [log.split("final loss")[1].splitlines()[0] for log in (first, second)]
    assert digests[0] == digests[1], "both groups have the same parameters"
    numbers.compare(history.shown, first)
    runs.record(
        runs.Result(
            EXAMPLE, EXAMPLE, runs.pins(EXAMPLE), f"{runs.what_runs(first)}, {GROUPS} groups", GROUPS,
            runs.resumed_after(second), runs.final_loss(expected), runs.final_loss(second),
        )
    )  # fmt: skip
