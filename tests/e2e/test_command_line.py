"""Every verb of the command line on a running cluster with an operator and real ranks, as processes of their own."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from tests.e2e.local_stack import command, endless, eventually, tiny
from tests.patience import patient

SCRIPTS = Path(sys.executable).parent


@dataclass(frozen=True)
class Done:
    """A command that has ended."""

    code: int
    out: str
    err: str


async def started(stage, *words, columns=80):
    environment = {
        **os.environ,
        "KUBECONFIG": str(stage.kubeconfig),
        "PATH": f"{SCRIPTS}:{os.environ['PATH']}",
        "COLUMNS": str(columns),
    }
    return await asyncio.create_subprocess_exec(
        *words, env=environment, stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip


async def run(stage, *words, code=0):
    """Run `meshwright` with these words; fails if its exit code is another."""
    process = await started(stage, *(words if words[0] == "kubectl" else ("meshwright", *words)))
    out, err = await asyncio.wait_for(process.communicate(), patient(300))
    done = Done(process.returncode, out.decode(), err.decode())
    assert done.code == code, (words, done)
    return done


def manifest(path, name, make=tiny, **changes):
    path.write_text(yaml.safe_dump_all(make(name, **changes)))
    return str(path)


async def test_the_life_of_a_job_in_every_verb(stage, tmp_path):
    file = manifest(tmp_path / "job.yaml", "verbs", endless, elastic={"minReplicas": 1})
    submitted = await run(stage, "submit", file)
    assert "paralleltrainingjob.meshwright.dev/verbs submitted to namespace default" in submitted.out
    follower = await started(stage, "meshwright", "logs", "verbs", "-f")
    waited = await run(stage, "wait", "verbs", "--for", "step=5", "--timeout", "10m")
    assert "Running: step" in waited.err

    async def shown(words):
        return (await run(stage, *words.split())).out

    table, listed, status, events, explained = await asyncio.gather(
        *map(shown, ("list", "list -A -o json", "status verbs", "events verbs", "explain verbs"))
    )
    assert "verbs" in table
    assert json.loads(listed)["items"]
    for text in ("Running", "rack rack", "ranks 0-1", "ranks 2-3", "TP 2 x PP 1 x DP 2", "Goodput", "4/4 ready"):
        assert text in status, status
    assert "GangStarted" in events
    assert "Proved optimal" in explained
    newest, chosen, both = await asyncio.gather(
        *map(shown, ("logs verbs --tail 50", "logs verbs --rank 3", "logs verbs --stage 0"))
    )
    assert "step " in newest
    assert "rank started rank=3" in chosen
    assert "rank=2" not in chosen
    assert {"[worker 0]", "[worker 1]"} <= set(both.replace("] ", "]\n").split("\n"))
    top, overview, costs = await asyncio.gather(
        run(stage, "top", "verbs", "--once"),
        run(stage, "top"),
        run(stage, "cost", "verbs", "--price", "2", "-o", "json"),
    )
    top, overview, costs = top.out, overview.out, costs.out
    # A real API server forwards to no loopback address: then the status is shown, with the reason.
    assert "STEP TIME" in top or "No metrics of ranks" in top, top
    assert "verbs" in overview
    spent = json.loads(costs)
    assert {row["job"] for row in spent} == {"verbs"}
    assert sum(row["gpuHours"] for row in spent) > 0
    assert all(row["cost"] == pytest.approx(2 * row["gpuHours"], abs=0.01) for row in spent)

    await run(stage, "scale", "verbs", "1")
    await run(stage, "wait", "verbs", "--for", "condition=Rescaling=False", "--timeout", "10m")
    await eventually("one replica trains", lambda: _ranks(stage, "2/2"))
    suspended = await run(stage, "suspend", "verbs", "--wait", "--timeout", "10m")
    assert "verbs suspended" in suspended.out
    await run(stage, "wait", "verbs", "--for", "complete", "--timeout", "1s", code=5)
    await run(stage, "resume", "verbs", "--wait", "--timeout", "10m")
    assert follower.returncode is None  # the follower outlives the pods
    assert "verbs deleted" in (await run(stage, "delete", "verbs", "--wait", "--timeout", "10m")).out
    followed, _ = await asyncio.wait_for(follower.communicate(), patient(60))
    assert followed.count(b"agent of worker 0 incarnation") >= 2  # the first pod, and that of the resumption


async def _ranks(stage, wanted):
    return (await stage.status("verbs")).ready_ranks == wanted


async def test_submit_and_follow_exits_with_the_result(stage, tmp_path):
    script = "import time; print('step 20/20 loss 1.0', flush=True); time.sleep(3)"
    words = ("python", "-c", script)
    file = manifest(tmp_path / "good.yaml", "followed", lambda name: command(name, *words, replicas=1))
    done = await run(stage, "submit", file, "--follow", "--timeout", "10m")
    assert "step 20/20" in done.out
    await run(stage, "wait", "followed")
    await run(stage, "wait", "followed", "--for", "step=50", code=1)


@pytest.mark.long
async def test_a_failed_job_exits_with_1_and_its_first_failure_is_shown(stage, tmp_path):
    """By default, `tests/cli` has the exit code and whose lines are shown, without a cluster."""
    script = "import os, sys, time; print('rank', os.environ['RANK'], 'of the command', flush=True);"
    script += "time.sleep(1); os.environ['RANK'] == '2' and sys.exit(7); time.sleep(600)"

    def failing(name, **recovery):
        return command(name, "python", "-c", script, recovery=recovery)

    file = manifest(tmp_path / "bad.yaml", "fails", failing, maxRestarts=0)
    done = await run(stage, "submit", file, "--wait", "--timeout", "10m", code=1)
    assert "Worker 1: rank 2 exited with code 7" in done.err
    recorded = (await run(stage, "logs", "fails", "--failed-first")).out
    assert "Worker 1: rank 2 exited with code 7: rank 2 of the command" in recorded
    await run(stage, "delete", "fails", "--wait")
    file = manifest(tmp_path / "retries.yaml", "retries", failing, maxRestarts=50)
    await run(stage, "submit", file)

    async def failed():
        return "RankFail" in (await run(stage, "events", "retries", "--warnings")).out

    await eventually("rank 2 has failed", failed)
    shown = (await run(stage, "logs", "retries", "--failed-first")).out
    assert "[rank 2] rank 2 of the command" in shown
    assert "[rank 3]" not in shown


@pytest.mark.long
async def test_a_job_that_waits_is_explained(stage, tmp_path):
    """By default, `tests/cli` has the explanation, and `test_lifecycle` a job that starts once it fits."""
    first = manifest(tmp_path / "first.yaml", "holder", lambda name: command(name, "sleep", "600"))
    await run(stage, "submit", first)
    await run(stage, "wait", "holder", "--for", "condition=Placed", "--timeout", "5m")
    second = manifest(tmp_path / "second.yaml", "waits", lambda name: command(name, "sleep", "600", replicas=4))
    await run(stage, "submit", second)
    await run(stage, "wait", "waits", "--for", "condition=Placed=False", "--timeout", "5m")
    text = (await run(stage, "explain", "waits")).out
    for part in (
        "4 workers with 2 GPUs each, 8 in total",
        "4 of 8 GPUs",
        "`spec.replicas: 2`",
        "job default/holder (4 GPUs",
    ):
        assert part in " ".join(text.split()), text
    await run(stage, "scale", "waits", "2")
    await run(stage, "wait", "waits", "--for", "condition=Placed", "--timeout", "5m")


async def test_doctor_finds_nothing_that_stops_jobs(stage):
    done = await run(stage, "doctor")
    assert "4 nodes with 8 GPUs" in done.out
    assert "errors" not in done.out.splitlines()[-1]


@pytest.mark.long  # the commands themselves are tested above
@pytest.mark.skipif(shutil.which("kubectl") is None, reason="no kubectl on the PATH")
async def test_kubectl_runs_the_same_commands_as_a_plugin(stage, tmp_path):
    file = manifest(tmp_path / "job.yaml", "plugged", lambda name: command(name, "true", replicas=1))
    assert "plugged submitted" in (await run(stage, "kubectl", "ptj", "submit", file)).out
    assert "plugged" in (await run(stage, "kubectl", "ptj", "list", "-o", "name")).out
    assert (
        (await run(stage, "kubectl", "ptj", "status", "plugd", code=3)).err.strip().endswith("did you mean `plugged`?")
    )
    assert "Usage: kubectl ptj wait" in (await run(stage, "kubectl", "ptj", "wait", "--help")).out
    completed = await run(stage, "kubectl", "__complete", "ptj", "status", "plu")
    assert completed.out.splitlines()[0] == "plugged"
    await run(stage, "kubectl", "ptj", "wait", "plugged", "--for", "complete", "--timeout", "10m", "-q")
    await run(stage, "kubectl", "ptj", "delete", "plugged")
