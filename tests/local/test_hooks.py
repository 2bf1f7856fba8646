"""Lifecycle hooks, and how the grace period is spent: in hooks, in the turn of sidecars, in the process."""

import asyncio
import time

import pytest

from meshwright_local.kube.resources import EVENTS, PODS

pytestmark = pytest.mark.asyncio(loop_scope="module")

MOUNTS = [{"name": "shared", "mountPath": "/shared"}]
ENV = [{"name": "DIR", "value": "/shared"}]
NOTE = 'note() { echo "$1" >> "$DIR/notes"; }; '
SERVE = "trap 'note {0}-ends; exit 0' TERM; note {0}-begins; while :; do sleep 0.05; done"
KEEP = {"finalizers": ["example.com/look"]}


def shell(script):
    return {"exec": {"command": ["sh", "-c", NOTE + script]}}


async def noted(kit, name, script, lifecycle, *, spec=None, meta=None, **container):
    """A pod whose container and hooks write notes into a volume that they share."""
    spec = {"volumes": [{"name": "shared", "emptyDir": {}}], **(spec or {})}
    more = {"env": ENV, "volumeMounts": MOUNTS, "lifecycle": lifecycle, **container}
    return await kit.pod(name, NOTE + script, spec=spec, meta=meta, **more)


def notes(kit, pod):
    if "nodeName" not in pod["spec"]:
        return []
    node, uid = pod["spec"]["nodeName"], pod["metadata"]["uid"]
    file = kit.cluster.directory / "nodes" / node / "pods" / uid / "volumes" / "shared" / "notes"
    return file.read_text().split() if file.exists() else []


async def deleted(kit, name, **options):
    """Delete a pod that a finalizer keeps, and return it once its containers have ended."""
    await kit.delete(name, **options)
    return await kit.ended(name)


async def let_go(kit, name):
    await kit.client.patch(PODS, name, {"metadata": {"finalizers": None}}, kit.namespace)
    await kit.vanished(name)


async def events(kit, name):
    listed = await kit.client.list(EVENTS, kit.namespace, field_selector=f"involvedObject.name={name}")
    return {(item["type"], item["reason"], item["message"]) for item in listed.items}


async def test_post_start_runs_before_the_container_counts_as_running(kit):
    hook = {"postStart": shell("until [ -e $DIR/go ]; do sleep 0.05; done; note hook")}
    await noted(kit, "post", SERVE.format("main"), hook)
    pod = await kit.pod_when("post", lambda pod: notes(kit, pod))
    status = (await kit.client.get(PODS, "post", kit.namespace))["status"]
    assert status["phase"] == "Pending"
    assert status["containerStatuses"][0]["state"]["waiting"]["reason"] == "ContainerCreating"
    node, uid = pod["spec"]["nodeName"], pod["metadata"]["uid"]
    (kit.cluster.directory / "nodes" / node / "pods" / uid / "volumes" / "shared" / "go").touch()
    pod = await kit.running("post")
    assert notes(kit, pod) == ["main-begins", "hook"]
    await kit.delete("post", grace_seconds=0)


async def test_the_next_container_waits_for_post_start(kit):
    second = {
        **{"name": "second", "image": "none", "env": ENV, "volumeMounts": MOUNTS},
        "command": ["sh", "-c", NOTE + "note second"],
    }
    first = {
        **{"name": "first", "image": "none", "env": ENV, "volumeMounts": MOUNTS},
        "command": ["sh", "-c", NOTE + "note first; while [ ! -e $DIR/done ]; do sleep 0.05; done"],
        "lifecycle": {"postStart": shell("sleep 0.3; note hook; touch $DIR/done")},
    }
    await noted(kit, "in-order", "", {}, spec={"containers": [first, second]})
    pod = await kit.ended("in-order")
    assert notes(kit, pod) == ["first", "hook", "second"]


async def test_a_failed_post_start_kills_the_container_and_the_restart_policy_applies(kit):
    # It succeeds the second time. The preStop hook runs too, as for every container that the kubelet kills.
    wait = "until grep -q main-begins $DIR/notes; do sleep 0.05; done; "
    begin = shell(wait + "[ -e $DIR/again ] || { touch $DIR/again; exit 1; }")
    hooks = {"postStart": begin, "preStop": shell("note stop")}
    await noted(kit, "post-fails", SERVE.format("main"), hooks, spec={"restartPolicy": "Always"})
    pod = await kit.pod_when("post-fails", lambda pod: len(notes(kit, pod)) == 4)
    status = pod["status"]["containerStatuses"][0]
    assert (status["restartCount"], status["lastState"]["terminated"]["exitCode"]) == (1, 0)
    assert notes(kit, pod) == ["main-begins", "stop", "main-ends", "main-begins"]

    async def told():
        return {
            ("Warning", "FailedPostStartHook", "PostStartHook failed"),
            ("Normal", "Killing", "FailedPostStartHook"),
        } <= await events(kit, "post-fails")

    await kit.until(told)
    await kit.delete("post-fails", grace_seconds=0)


async def test_pre_stop_runs_before_sigterm_within_the_grace_period(kit):
    hooks = {"preStop": shell("note hook; sleep 0.3; note hook-ends")}
    await noted(kit, "pre", SERVE.format("main"), hooks, meta=KEEP)
    await kit.running("pre")
    pod = await deleted(kit, "pre")
    assert notes(kit, pod) == ["main-begins", "hook", "hook-ends", "main-ends"]
    await let_go(kit, "pre")


async def test_a_pre_stop_that_takes_too_long_leaves_two_seconds(kit):
    hooks = {"preStop": shell("note hook; sleep 60")}
    await noted(kit, "slow-hook", SERVE.format("main"), hooks, meta=KEEP)
    await kit.running("slow-hook")
    began = time.monotonic()
    pod = await deleted(kit, "slow-hook", grace_seconds=1)
    assert notes(kit, pod) == ["main-begins", "hook", "main-ends"]
    assert time.monotonic() - began >= 0.9

    async def told():
        return ("Warning", "FailedPreStopHook", "PreStopHook failed") in await events(kit, "slow-hook")

    await kit.until(told)
    await let_go(kit, "slow-hook")


async def test_a_shorter_grace_period_ends_a_hook(kit):
    await noted(kit, "hurry", SERVE.format("main"), {"preStop": shell("note hook; sleep 600")}, meta=KEEP)
    await kit.running("hurry")
    await kit.delete("hurry", grace_seconds=600)
    await kit.pod_when("hurry", lambda pod: "hook" in notes(kit, pod))
    pod = await deleted(kit, "hurry", grace_seconds=1)
    # Like a kubelet, it begins again: the hook too.
    assert notes(kit, pod) == ["main-begins", "hook", "hook", "main-ends"]
    await let_go(kit, "hurry")


async def test_a_failed_pre_stop_is_an_event(kit):
    await noted(kit, "pre-fails", SERVE.format("main"), {"preStop": shell("exit 3")}, meta=KEEP)
    await kit.running("pre-fails")
    pod = await deleted(kit, "pre-fails")
    assert notes(kit, pod) == ["main-begins", "main-ends"]

    async def told():
        return ("Warning", "FailedPreStopHook", "PreStopHook failed") in await events(kit, "pre-fails")

    await kit.until(told)
    await let_go(kit, "pre-fails")


async def test_hooks_over_http_and_sleep(kit):
    seen = []

    async def answer(reader, writer):
        seen.append((await reader.readuntil(b"\r\n\r\n")).decode())
        writer.write(b"HTTP/1.1 500 No\r\nContent-Length: 0\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as web:
        port = web.sockets[0].getsockname()[1]
        action = {"host": "127.0.0.1", "port": port, "path": "/begun", "httpHeaders": [{"name": "A", "value": "b"}]}
        hooks = {"postStart": {"httpGet": action}, "preStop": {"sleep": {"seconds": 1}}}
        await noted(kit, "calls", SERVE.format("main"), hooks, meta=KEEP)
        await kit.running("calls")  # an answer is enough, whatever it says
    assert seen[0].startswith("GET /begun HTTP/1.1")
    assert "A: b" in seen[0]
    assert "User-Agent: kube-lifecycle/1.36" in seen[0]
    began = time.monotonic()
    await deleted(kit, "calls")
    assert time.monotonic() - began >= 0.9
    assert "FailedPreStopHook" not in await kit.events_of("calls")
    await let_go(kit, "calls")


async def test_hooks_of_sidecars_begin_at_once_and_their_processes_end_last(kit):
    def sidecar(name, hook):
        return {
            **{"name": name, "image": "none", "env": ENV, "volumeMounts": MOUNTS, "restartPolicy": "Always"},
            **{"command": ["sh", "-c", NOTE + SERVE.format(name)], "lifecycle": {"preStop": shell(hook)}},
        }

    wait = "until grep -q main-hook $DIR/notes; do sleep 0.05; done; "
    spec = {"initContainers": [sidecar("one", wait + "note one-hook; touch $DIR/told"), sidecar("two", wait)]}
    # The main container ends only after the hook of a sidecar has run.
    hooks = {"preStop": shell("note main-hook; until [ -e $DIR/told ]; do sleep 0.05; done")}
    await noted(kit, "three", SERVE.format("main"), hooks, spec=spec, meta=KEEP)
    await kit.running("three")
    pod = await deleted(kit, "three")
    expected = ["main-hook", "one-hook", "main-ends", "two-ends", "one-ends"]
    assert notes(kit, pod) == ["one-begins", "two-begins", "main-begins", *expected]
    await let_go(kit, "three")


async def test_a_sidecar_is_not_restarted_while_its_pod_ends(kit):
    side = {
        **{"name": "side", "image": "none", "env": ENV, "volumeMounts": MOUNTS, "restartPolicy": "Always"},
        "command": ["sh", "-c", NOTE + "note side; while [ ! -e $DIR/leave ]; do sleep 0.05; done"],
    }
    hooks = {"preStop": shell("touch $DIR/leave; sleep 0.5")}
    await noted(kit, "no-restart", SERVE.format("main"), hooks, spec={"initContainers": [side]}, meta=KEEP)
    await kit.running("no-restart")
    pod = await deleted(kit, "no-restart")
    assert notes(kit, pod) == ["side", "main-begins", "main-ends"]
    assert pod["status"]["initContainerStatuses"][0]["restartCount"] == 0
    await let_go(kit, "no-restart")


async def test_a_forced_deletion_leaves_two_seconds(kit):
    await noted(kit, "forced", "trap 'note term' TERM; note begins; while :; do sleep 0.05; done", {})
    pod = await kit.pod_when("forced", lambda pod: notes(kit, pod))
    directory = kit.cluster.directory / "nodes" / pod["spec"]["nodeName"] / "pods" / pod["metadata"]["uid"]
    await kit.delete("forced", grace_seconds=0)
    assert await kit.client.find(PODS, "forced", kit.namespace) is None

    async def asked():
        return notes(kit, pod) == ["begins", "term"]

    async def gone():
        return not directory.exists()

    await kit.until(asked)
    await kit.until(gone)
