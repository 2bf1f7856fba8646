"""Pods of a profile with a daemon beside the worker, as clouds need for their networks."""

from __future__ import annotations

from tests.e2e.local_stack import command

SCRIPT = """
import os, signal, sys, time
log = open(os.environ["SHARED"] + "/log").read().split()
if log != ["prepared", "daemon"]:
    sys.exit(f"the daemon was not there first: {log}")
generation, rank = os.environ["MESHWRIGHT_GENERATION"], os.environ["RANK"]
if rank == "3" and generation == "1":
    sys.exit(5)
if rank == "3" and generation == "2":
    agent = open(f"/proc/{os.getppid()}/stat").read().rpartition(")")[2].split()[1]
    os.kill(int(agent), signal.SIGKILL)
time.sleep(1 if generation == "3" else 600)
"""


async def test_a_daemon_beside_the_worker_neither_ends_nor_holds_a_job(stage):
    await stage.apply(command("sided", "python", "-c", SCRIPT, workers={"profile": "sided"}))
    status = await stage.until("sided", lambda s: s.restart_count == 1, "restarted in place")
    assert status.last_failure is not None
    assert "rank 3 exited with code 5" in status.last_failure.message
    status = await stage.until("sided", lambda s: s.restart_count == 2, "restarted with a new pod")
    assert status.last_failure is not None
    assert "sided-w1-0 exited with code 137" in status.last_failure.message
    await stage.complete("sided")
    for pod in (await stage.pod("sided", 0), await stage.pod("sided", 1)):
        _, daemon = pod["status"]["initContainerStatuses"]
        assert (pod["status"]["phase"], daemon["state"]["terminated"]["exitCode"]) == ("Succeeded", 9)
    await stage.delete("sided")
