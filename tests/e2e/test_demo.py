"""`meshwright demo` as a program: its verdict, and what it leaves behind."""

import asyncio
import os
import re
import signal
import sys
from pathlib import Path

import pytest
import yaml

from tests.e2e.local_stack import EXAMPLES, eventually, tiny
from tests.patience import patient

WHOLE_DEMO_SECONDS = 840
"""A demo takes minutes on two cores that it has alone; pytest ends a test after 900 s."""
DEMO = [sys.executable, "-c", "from meshwright_cli.main import main; main()", "demo"]


async def start(directory, *options):
    return await asyncio.create_subprocess_exec(
        *DEMO, "--directory", str(directory), *options,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip


async def read_until(process, word):
    assert process.stdout is not None
    seen = []
    async with asyncio.timeout(patient(150)):
        while not seen or word not in seen[-1]:
            line = await process.stdout.readline()
            assert line, "".join(seen)
            seen.append(line.decode())
    return "".join(seen)


def connected(directory):
    """Processes that know of the demo's directory: by command line or by environment."""
    needle = str(directory).encode()
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                if any(needle in (entry / part).read_bytes() for part in ("cmdline", "environ")):
                    found.append((entry / "cmdline").read_bytes())
            except OSError:
                continue
    return found


@pytest.fixture
def job(tmp_path):
    """A job that is over in seconds."""
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump_all(tiny("short", training={"steps": 100})))
    return path


@pytest.mark.long
async def test_demo_loses_a_worker_recovers_and_tells_it(tmp_path, job):
    directory = tmp_path / "demo"
    process = await start(directory, "--manifest", str(job))
    out = (await asyncio.wait_for(process.communicate(), WHOLE_DEMO_SECONDS))[0].decode()
    assert process.returncode == 0, out
    for word in (
        "FAULT: deleting worker pod short-w1-0",
        "RECOVERED",
        "short-w1-1",
        "Training again after",
        "placement",
        "def ",
    ):
        assert word in out, out
    assert "step 100, 800 samples" in out
    checkpoint = next(Path(line.split()[-1]) for line in out.splitlines() if line.startswith("checkpoint "))
    assert (checkpoint / "meshwright.json").exists()
    assert connected(directory) == []


def demos_own_job():
    """The demo's own job, with half of its steps."""
    items = list(yaml.safe_load_all((EXAMPLES / "stdlib-lm.yaml").read_text()))
    items[-1]["spec"]["training"]["steps"] = 100
    return items


def fast_job():
    """A job that would be over before a node can join."""
    parallelism = {"tensor": 2, "pipeline": 2, "microBatches": 2}
    elastic = {"replacementSeconds": 5, "pauseSeconds": 10}
    return tiny("stdlib-lm", parallelism=parallelism, elastic=elastic, training={"globalBatchSize": 32})


@pytest.mark.long
@pytest.mark.parametrize("make", [demos_own_job, fast_job])
async def test_demo_of_an_elastic_job_loses_a_node_shrinks_and_grows_again(tmp_path, make):
    path, directory = tmp_path / "job.yaml", tmp_path / "demo"
    path.write_text(yaml.safe_dump_all(make()))
    process = await start(directory, "--manifest", str(path))
    out = (await asyncio.wait_for(process.communicate(), WHOLE_DEMO_SECONDS))[0].decode()
    assert process.returncode == 0, out
    for word in (
        "RECOVERED",
        "FAULT: node rack1-node1 is gone for good",
        "SMALLER: 1 of 2 replicas trains on",
        "replicas 1 of 2",
        "NODE: rack1-spare joins the cluster",
        "GROWN: 2 of 2 replicas train again",
        ", as computed from the data alone",
        "rack1-spare w3",
    ):
        assert word in out, out
    found = re.search(r"^trained +step (\d+), ([\d,]+) samples", out, re.MULTILINE)
    assert found is not None, out
    assert int(found[2].replace(",", "")) == 32 * int(found[1])
    if make is fast_job:
        assert "FAST: a step takes" in out, out
        assert int(found[1]) > 60
    assert connected(directory) == []


@pytest.mark.long
async def test_a_stopped_demo_leaves_no_process_and_the_next_one_works(tmp_path, job):
    directory = tmp_path / "demo"

    async def gone():
        return not connected(directory)

    for number, code in ((signal.SIGKILL, -9), (signal.SIGINT, 130), (signal.SIGTERM, 143)):
        process = await start(directory, "--manifest", str(job))
        await read_until(process, "MeshFormed")
        assert len(connected(directory)) >= 4  # cluster, operator, two agents
        process.send_signal(number)
        assert await asyncio.wait_for(process.wait(), patient(60)) == code
        await eventually(f"every process of the demo is gone after {number.name}", gone, 60)


async def test_a_job_that_cannot_complete_is_a_failed_demo(tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump_all(tiny("huge", replicas=64, training={"globalBatchSize": 128, "steps": 5})))
    process = await start(tmp_path / "demo", "--manifest", str(path), "--timeout", "3")
    out = (await asyncio.wait_for(process.communicate(), patient(150)))[0].decode()
    assert process.returncode == 1
    assert "did not finish within 3 s" in out
    assert "--- operator" in out
