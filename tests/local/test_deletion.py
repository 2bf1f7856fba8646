"""The end of pods: grace periods, kills, and that nothing of a pod is left."""

import asyncio
import os
import signal
import time
from pathlib import Path

import pytest

from meshwright_local.kube.resources import PODS
from tests.patience import LEAST_SECONDS

pytestmark = pytest.mark.asyncio(loop_scope="module")

STUBBORN = "trap '' TERM; echo ready; while true; do sleep 0.1; done"
POLITE = "trap 'echo bye; exit 0' TERM; echo ready; while true; do sleep 0.05; done"
LONG = int(3 * LEAST_SECONDS)
"""A grace period that no test waits for."""
# A child in a session of its own, whose parent is gone: nothing ties it to the container but its ancestry.
ESCAPING = "(setsid sleep 1234.5 &); echo ready; exec sleep 60"


def alive(marker: str) -> list[int]:
    """Pids of processes whose command line or environment holds a text."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
                text = (entry / "cmdline").read_bytes() + (entry / "environ").read_bytes()
            except OSError:
                continue
            if marker.encode() in text and state != "Z":
                found.append(int(entry.name))
    return found


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


async def start(kit, name, script, **spec):
    """Run a pod whose processes carry its name in their environment, until it says `ready`."""
    await kit.pod(name, script, env=[{"name": "MARKER", "value": f"marker-{name}-end"}], spec=spec)
    pod = await kit.running(name)

    async def ready():
        return "ready" in kit.log_of(pod)

    await kit.until(ready)
    await processes(kit, name, 1)
    return pod


async def processes(kit, name, count):
    """The pod's processes, once there are so many: one that becomes another program has no environment for a moment."""

    async def look():
        found = alive(f"marker-{name}-end")
        return found if len(found) >= count else None

    return await kit.until(look)


async def test_sigterm_lets_a_process_end(kit):
    pod = await start(kit, "polite", POLITE, terminationGracePeriodSeconds=LONG)
    watched = asyncio.create_task(kit.vanished("polite"))
    await kit.delete("polite")
    live = await kit.client.find(PODS, "polite", "default")
    assert live is None or live["metadata"]["deletionTimestamp"]
    await watched
    assert not alive("marker-polite-end")
    assert pod["metadata"]["uid"]


async def test_sigkill_after_the_grace_period(kit):
    await start(kit, "stubborn", STUBBORN)
    begun = time.monotonic()
    await kit.delete("stubborn", grace_seconds=1)
    await kit.vanished("stubborn")
    assert time.monotonic() - begun > 0.9
    assert not alive("marker-stubborn-end")


async def test_the_object_stays_until_the_processes_are_gone(kit):
    await start(kit, "lingering", STUBBORN)
    await kit.delete("lingering", grace_seconds=1)
    await kit.vanished("lingering")
    assert not alive("marker-lingering-end")


async def test_a_shorter_grace_period_counts(kit):
    await start(kit, "impatient", STUBBORN)
    await kit.delete("impatient", grace_seconds=LONG)
    await kit.delete("impatient", grace_seconds=1)
    await kit.vanished("impatient")


async def test_force_delete_removes_the_object_at_once_and_the_processes_soon(kit):
    await start(kit, "forced-out", STUBBORN)
    await kit.delete("forced-out", grace_seconds=0)
    assert await kit.client.find(PODS, "forced-out", "default") is None

    async def gone():
        return not alive("marker-forced-out-end")

    await kit.until(gone, 3.0, "processes are killed")


async def test_descendants_that_left_the_group_are_killed(kit):
    await start(kit, "escaping", ESCAPING)
    assert len(await processes(kit, "escaping", 2)) == 2
    await kit.delete("escaping", grace_seconds=0)

    async def gone():
        return not alive("marker-escaping-end")

    await kit.until(gone, 3.0, "all are killed")


async def test_descendants_end_with_the_main_process(kit):
    await kit.pod("short", "(setsid sleep 1234.5 &); exit 0", env=[{"name": "MARKER", "value": "marker-short-end"}])
    pod = await kit.ended("short")
    assert pod["status"]["phase"] == "Succeeded"
    assert not alive("marker-short-end")


async def test_a_killed_shim_takes_its_container_along(kit):
    await start(kit, "orphaned", "echo ready; exec sleep 60")
    (main,) = await processes(kit, "orphaned", 1)
    os.kill(parent_of(main), signal.SIGKILL)
    pod = await kit.ended("orphaned")
    assert pod["status"]["containerStatuses"][0]["state"]["terminated"]["exitCode"] == 137
    assert not alive("marker-orphaned-end")


async def test_deleting_a_finished_pod(kit):
    await kit.pod("finished", "true")
    await kit.ended("finished")
    await kit.delete("finished")
    await kit.vanished("finished", 2)


async def test_deleting_a_pod_that_waits_for_a_volume(kit):
    volumes = [{"name": "v", "configMap": {"name": "never-made"}}]
    await kit.pod("waiting", "echo", spec={"volumes": volumes})
    await kit.pod_when("waiting", lambda pod: pod["status"].get("podIP"))

    async def told():
        return "FailedMount" in await kit.events_of("waiting")

    await kit.until(told)
    await kit.delete("waiting")
    await kit.vanished("waiting", 2)


async def test_what_a_pod_left_on_the_node_goes_with_it(kit):
    await kit.pod("tidy", 'touch "$HOME/x" "$TMPDIR/y"')
    pod = await kit.ended("tidy")
    directory = kit.cluster.directory / "nodes" / pod["spec"]["nodeName"] / "pods" / pod["metadata"]["uid"]
    assert (directory / "home" / "x").exists()
    await kit.delete("tidy", grace_seconds=0)

    async def gone():
        return not directory.exists()

    await kit.until(gone)
