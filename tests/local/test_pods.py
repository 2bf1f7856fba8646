"""A pod's life: what its processes see, how they end, what the status says."""

import json
import sys
from pathlib import Path

import pytest

from meshwright_local.kube.resources import CONFIG_MAPS, PODS, SECRETS

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_success_and_status(kit):
    await kit.pod("good", "echo done")
    pod = await kit.ended("good")
    status = pod["status"]
    assert status["phase"] == "Succeeded"
    assert status["podIP"].startswith("127.")
    assert status["hostIP"] == "127.0.0.1"
    terminated = status["containerStatuses"][0]["state"]["terminated"]
    assert (terminated["exitCode"], terminated["reason"]) == (0, "Completed")
    conditions = {item["type"]: item["status"] for item in status["conditions"]}
    assert conditions["PodScheduled"] == conditions["Initialized"] == "True"
    assert conditions["Ready"] == conditions["ContainersReady"] == "False"
    assert kit.log_of(pod) == "done\n"

    async def told():
        return {"Scheduled", "Created", "Started"} <= await kit.events_of("good")

    await kit.until(told)


@pytest.mark.parametrize(
    ("name", "script", "code", "reason"),
    [
        ("code-3", "exit 3", 3, "Error"),
        ("killed", "kill -9 $$$$", 137, "Error"),
        ("terminated", "kill -TERM $$$$", 143, "Error"),
    ],
)
async def test_exit_codes(kit, name, script, code, reason):
    await kit.pod(name, script)
    pod = await kit.ended(name)
    terminated = pod["status"]["containerStatuses"][0]["state"]["terminated"]
    assert pod["status"]["phase"] == "Failed"
    assert (terminated["exitCode"], terminated["reason"]) == (code, reason)


async def test_a_command_that_does_not_exist(kit):
    await kit.pod("nonsense", "no-such-command", "x")
    pod = await kit.ended("nonsense")
    terminated = pod["status"]["containerStatuses"][0]["state"]["terminated"]
    assert (terminated["exitCode"], terminated["reason"]) == (128, "StartError")
    assert "no-such-command" in terminated["message"]


async def test_no_command_is_explained(kit):
    await kit.pod("imageonly", "x", command=None)

    def explained(pod):
        waiting = (pod["status"].get("containerStatuses") or [{"state": {}}])[0]["state"].get("waiting") or {}
        return waiting.get("reason") == "CreateContainerError" and "spec.containers[].command" in waiting["message"]

    await kit.pod_when("imageonly", explained)
    await kit.delete("imageonly", grace_seconds=0)


async def test_environment(kit):
    await kit.client.create(
        CONFIG_MAPS, {"metadata": {"name": "settings"}, "data": {"one": "1", "two": "2"}}, "default"
    )
    await kit.client.create(SECRETS, {"metadata": {"name": "hidden"}, "data": {"key": "czNjcmV0"}}, "default")
    env = [
        {"name": "PLAIN", "value": "plain"},
        {"name": "EXPANDED", "value": "$(PLAIN)-$(NOWHERE)-$$(PLAIN)"},
        {"name": "NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
        {"name": "NODE", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
        {"name": "IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        {"name": "LABEL", "valueFrom": {"fieldRef": {"fieldPath": "metadata.labels['team']"}}},
        {"name": "NOTE", "valueFrom": {"fieldRef": {"fieldPath": "metadata.annotations['example.com/note']"}}},
        {"name": "ONE", "valueFrom": {"configMapKeyRef": {"name": "settings", "key": "one"}}},
        {"name": "MISSING", "valueFrom": {"configMapKeyRef": {"name": "settings", "key": "x", "optional": True}}},
        {"name": "KEY", "valueFrom": {"secretKeyRef": {"name": "hidden", "key": "key"}}},
        {"name": "CORES", "valueFrom": {"resourceFieldRef": {"resource": "limits.cpu"}}},
    ]
    await kit.pod(
        "env",
        "python",
        "-c",
        "import json,os,sys; print(json.dumps([dict(os.environ), sys.executable, sys.argv]))",
        "$(PLAIN)",
        env=env,
        envFrom=[{"prefix": "S_", "configMapRef": {"name": "settings"}}],
        resources={"limits": {"cpu": "1500m"}},
        meta={"labels": {"team": "a"}, "annotations": {"example.com/note": "b"}},
    )
    pod = await kit.ended("env")
    seen, interpreter, argv = json.loads(kit.log_of(pod))
    expected = {
        "PLAIN": "plain",
        "EXPANDED": "plain-$(NOWHERE)-$(PLAIN)",
        "NAME": "env",
        "NODE": pod["spec"]["nodeName"],
        "IP": pod["status"]["podIP"],
        "LABEL": "a",
        "NOTE": "b",
        "ONE": "1",
        "KEY": "s3cret",
        "CORES": "2",
        "S_two": "2",
        "HOSTNAME": "env",
        "GLOO_SOCKET_IFNAME": "lo",
        "CUDA_VISIBLE_DEVICES": "",
    }
    assert {name: seen.get(name) for name in expected} == expected
    assert "MISSING" not in seen
    assert not any("TOKEN" in name for name in seen), "nothing of the agent's own environment"
    assert Path(interpreter).parent == Path(sys.executable).parent
    assert argv[1:] == ["plain"]


async def test_volumes_by_path(kit):
    await kit.client.create(
        CONFIG_MAPS, {"metadata": {"name": "scripts"}, "data": {"go.sh": "echo from script"}}, "default"
    )
    volumes = [
        {"name": "scratch", "emptyDir": {}},
        {"name": "code", "configMap": {"name": "scripts", "defaultMode": 0o755}},
        {"name": "about", "downwardAPI": {"items": [{"path": "labels", "fieldRef": {"fieldPath": "metadata.labels"}}]}},
    ]
    mounts = [
        {"name": "scratch", "mountPath": "/scratch"},
        {"name": "code", "mountPath": "/code"},
        {"name": "about", "mountPath": "/about"},
    ]
    writer = {
        "name": "writer",
        "image": "none",
        "command": ["sh", "-c", 'echo written > "$1"', "sh", "/scratch/file"],
        "volumeMounts": mounts,
    }
    await kit.pod(
        "volumes",
        "sh",
        "-c",
        'cat "$FILE"; sh "$1"; cat "${2#--labels=}"; echo; pwd',
        "sh",
        "/code/go.sh",
        "--labels=/about/labels",
        env=[{"name": "FILE", "value": "/scratch/file"}],
        workingDir="/scratch",
        volumeMounts=mounts,
        spec={"volumes": volumes, "initContainers": [writer]},
        meta={"labels": {"team": "a"}},
    )
    pod = await kit.ended("volumes")
    *lines, directory = kit.log_of(pod).splitlines()
    assert lines[:2] == ["written", "from script"]
    assert 'team="a"' in lines
    assert directory.endswith("/scratch")


async def test_waits_for_a_config_map(kit):
    await kit.pod(
        "early", "echo $ONE", env=[{"name": "ONE", "valueFrom": {"configMapKeyRef": {"name": "late", "key": "k"}}}]
    )

    def waits(pod):
        statuses = pod["status"].get("containerStatuses") or [{"state": {}}]
        return (statuses[0]["state"].get("waiting") or {}).get("reason") == "CreateContainerConfigError"

    await kit.pod_when("early", waits)
    await kit.client.create(CONFIG_MAPS, {"metadata": {"name": "late"}, "data": {"k": "now"}}, "default")
    pod = await kit.ended("early")
    assert kit.log_of(pod) == "now\n"


async def test_init_containers_run_in_order_and_can_fail(kit):
    first = {"name": "first", "image": "none", "command": ["sh", "-c", "exit 4"]}
    await kit.pod("init-fails", "echo never", spec={"initContainers": [first]})
    pod = await kit.ended("init-fails")
    assert pod["status"]["phase"] == "Failed"
    assert pod["status"]["initContainerStatuses"][0]["state"]["terminated"]["exitCode"] == 4
    assert kit.log_of(pod) == ""


def _shell(name, script, **more):
    mounts = [{"name": "shared", "mountPath": "/shared"}]
    return {"name": name, "image": "none", "command": ["sh", "-c", script], "volumeMounts": mounts, **more}


SHARED = [{"name": "shared", "emptyDir": {}}]
NOTE = 'note() { echo "$1" >> "$DIR/notes"; }; '


def _sidecar(name, script, **more):
    env = [{"name": "DIR", "value": "/shared"}]
    return _shell(name, NOTE + script, env=env, restartPolicy="Always", **more)


async def test_sidecars_run_beside_the_containers_and_end_after_them(kit):
    serve = "trap 'note {0}-ends; exit 7' TERM; note {0}-begins; while :; do sleep 0.05; done"
    env = [{"name": "DIR", "value": "/shared"}]
    inits = [
        _sidecar("one", serve.format("one")),
        _shell("between", NOTE + "until [ -s $DIR/notes ]; do sleep 0.05; done; note between", env=env),
        _sidecar("two", serve.format("two")),
    ]
    main = NOTE + "until grep -q two-begins $DIR/notes; do sleep 0.05; done; note main; sleep 0.3; note main-ends"
    mounts = [{"name": "shared", "mountPath": "/shared"}]
    await kit.pod("sided", main, env=env, volumeMounts=mounts, spec={"initContainers": inits, "volumes": SHARED})
    both = await kit.pod_when("sided", lambda pod: pod["status"].get("phase") == "Running")
    assert [item["state"].keys() for item in both["status"]["initContainerStatuses"][::2]] == [{"running"}] * 2
    assert {"type": "Initialized", "status": "True"}.items() <= both["status"]["conditions"][1].items()
    pod = await kit.ended("sided")
    assert pod["status"]["phase"] == "Succeeded"
    codes = [item["state"]["terminated"]["exitCode"] for item in pod["status"]["initContainerStatuses"]]
    assert codes == [7, 0, 7]
    if kit.cluster.nodes:
        (notes,) = kit.cluster.directory.glob(f"nodes/*/pods/{pod['metadata']['uid']}/volumes/**/notes")
        expected = ["one-begins", "between", "two-begins", "main", "main-ends", "two-ends", "one-ends"]
        assert notes.read_text().split() == expected


async def test_a_sidecar_is_restarted_whatever_the_pods_policy(kit):
    script = "n=$(cat $DIR/n 2>/dev/null || echo 0); echo $((n+1)) > $DIR/n; [ $n -ge 1 ] && exec sleep 60; exit 3"
    ready = {"exec": {"command": ["sh", "-c", "[ $(cat $DIR/n) -ge 2 ]"]}, "periodSeconds": 1, "failureThreshold": 60}
    mounts = [{"name": "shared", "mountPath": "/shared"}]
    await kit.pod(
        "restarted",
        "cat $DIR/n",
        env=[{"name": "DIR", "value": "/shared"}],
        volumeMounts=mounts,
        spec={"initContainers": [_sidecar("side", script, startupProbe=ready)], "volumes": SHARED},
    )
    pod = await kit.ended("restarted", 20)
    status = pod["status"]["initContainerStatuses"][0]
    assert (pod["status"]["phase"], status["restartCount"]) == ("Succeeded", 1)
    assert kit.log_of(pod) == "2\n"


async def test_deletion_stops_the_containers_before_the_sidecars(kit):
    slow = "trap 'sleep 0.3; echo main >> $DIR/notes; exit 0' TERM; while :; do sleep 0.05; done"
    side = "trap 'note side; exit 0' TERM; while :; do sleep 0.05; done"
    env = [{"name": "DIR", "value": "/shared"}]
    mounts = [{"name": "shared", "mountPath": "/shared"}]
    spec = {"initContainers": [_sidecar("side", side)], "volumes": SHARED}
    meta = {"finalizers": ["example.com/look"]}
    await kit.pod("deleted", slow, env=env, volumeMounts=mounts, spec=spec, meta=meta)
    await kit.running("deleted")
    await kit.delete("deleted")
    pod = await kit.ended("deleted")
    await kit.client.patch(PODS, "deleted", {"metadata": {"finalizers": None}}, kit.namespace)
    await kit.vanished("deleted")
    begun = pod["status"]["containerStatuses"][0]["state"]["terminated"]["finishedAt"]
    assert begun <= pod["status"]["initContainerStatuses"][0]["state"]["terminated"]["finishedAt"]


async def test_restarts_on_failure(kit):
    script = 'n=$(cat "$F" 2>/dev/null || echo 0); echo $((n+1)) > "$F"; [ $n -ge 2 ]'
    await kit.pod(
        "flaky",
        script,
        env=[{"name": "F", "value": "/keep/count"}],
        volumeMounts=[{"name": "keep", "mountPath": "/keep"}],
        spec={"restartPolicy": "OnFailure", "volumes": [{"name": "keep", "emptyDir": {}}]},
    )
    pod = await kit.ended("flaky")
    assert pod["status"]["phase"] == "Succeeded"
    status = pod["status"]["containerStatuses"][0]
    assert status["restartCount"] == 2
    assert status["lastState"]["terminated"]["exitCode"] == 1


async def test_readiness_and_liveness(kit):
    probe = {"exec": {"command": ["test", "-e", "/flags/ready"]}, "periodSeconds": 1}
    live = {"exec": {"command": ["test", "!", "-e", "/flags/dead"]}, "periodSeconds": 1, "failureThreshold": 1}
    await kit.pod(
        "probed",
        "sleep 600",
        readinessProbe=probe,
        livenessProbe=live,
        volumeMounts=[{"name": "flags", "mountPath": "/flags"}],
        spec={"volumes": [{"name": "flags", "emptyDir": {}}], "terminationGracePeriodSeconds": 600},
    )

    def ready(pod):
        return any(c["type"] == "Ready" and c["status"] == "True" for c in pod["status"].get("conditions") or ())

    pod = await kit.running("probed")
    assert not ready(pod)
    node, uid = pod["spec"]["nodeName"], pod["metadata"]["uid"]
    flags = kit.cluster.directory / "nodes" / node / "pods" / uid / "volumes" / "flags"
    (flags / "ready").touch()
    await kit.pod_when("probed", ready)
    (flags / "dead").touch()
    pod = await kit.ended("probed")
    assert pod["status"]["containerStatuses"][0]["state"]["terminated"]["exitCode"] == 143


async def test_http_and_tcp_probes_ask_at_the_pods_address(kit):
    http = {"httpGet": {"path": "/", "port": "web"}, "periodSeconds": 1}
    tcp = {"tcpSocket": {"port": 8080}, "periodSeconds": 1}
    for name in ("web-a", "web-b"):  # the same port in two pods
        await kit.pod(
            name,
            "python",
            "-m",
            "http.server",
            "--bind",
            "$(IP)",
            "8080",
            env=[{"name": "IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}],
            ports=[{"name": "web", "containerPort": 8080}],
            startupProbe=tcp,
            readinessProbe=http,
        )
    for name in ("web-a", "web-b"):
        await kit.pod_when(name, lambda pod: (pod["status"].get("containerStatuses") or [{}])[0].get("ready"))
        await kit.delete(name, grace_seconds=0)


async def test_active_deadline(kit):
    await kit.pod("slow", "sleep 60", spec={"activeDeadlineSeconds": 1, "terminationGracePeriodSeconds": 1})
    pod = await kit.ended("slow")
    assert (pod["status"]["phase"], pod["status"]["reason"]) == ("Failed", "DeadlineExceeded")


async def test_termination_message(kit):
    await kit.pod("message", "sh", "-c", 'echo why > "$1"; exit 1', "sh", "/dev/termination-log")
    pod = await kit.ended("message")
    assert pod["status"]["containerStatuses"][0]["state"]["terminated"]["message"] == "why\n"
    await kit.pod("fallback", "echo the end; exit 1", terminationMessagePolicy="FallbackToLogsOnError")
    pod = await kit.ended("fallback")
    assert pod["status"]["containerStatuses"][0]["state"]["terminated"]["message"] == "the end"


async def test_memory_limit(kit):
    resources = {"limits": {"memory": "64Mi"}}
    hog = "import time; x = bytearray(200 << 20); time.sleep(60)"
    await kit.pod("hog", "python", "-c", hog, resources=resources)
    await kit.pod("modest", "python", "-c", "import time; time.sleep(2.5)", resources=resources)
    pod = await kit.ended("hog")
    terminated = pod["status"]["containerStatuses"][0]["state"]["terminated"]
    assert (terminated["exitCode"], terminated["reason"]) == (137, "OOMKilled")
    assert (await kit.ended("modest"))["status"]["phase"] == "Succeeded"


async def test_a_pod_forced_onto_a_full_node_is_rejected(kit):
    resources = {"limits": {"nvidia.com/gpu": "3"}, "requests": {"nvidia.com/gpu": "3"}}
    await kit.pod("forced", "echo", resources=resources, spec={"nodeName": "rack0-node0"})
    pod = await kit.ended("forced")
    assert pod["status"]["reason"] == "OutOfnvidia.com/gpu"
