"""The node agent with a file system for each container and without: real mounts, names, failures of nodes."""

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio

from meshwright_local.kube.client import ApiClient
from meshwright_local.kube.resources import CONFIG_MAPS, LEASES, NODES, PODS, SERVICES, Resource
from meshwright_local.nodeagent.agent import AgentSettings, NodeAgent
from meshwright_local.nodeagent.network.addresses import ClusterNetwork
from meshwright_local.nodeagent.node import FILE_SYSTEM_ANNOTATION, NodeSpec
from meshwright_local.nodeagent.runtime.mount_namespace import FileSystemView, Mount
from meshwright_local.nodeagent.runtime.process import Process, ProcessSpec, StartError
from meshwright_local.providers.base import Provider
from meshwright_local.providers.embedded import EmbeddedProvider
from meshwright_local.providers.envtest import EnvtestProvider
from tests.local.conftest import Kit

pytestmark = pytest.mark.asyncio(loop_scope="module")

ACCOUNTS = Resource("", "v1", "serviceaccounts", "ServiceAccount")


class Station(Kit):
    """A control plane and nodes: `mounted`, whose containers have file systems of their own, `plain` and `comma`."""

    def __init__(self, client: ApiClient, directory: Path) -> None:
        self._client = client
        self.namespace = "default"
        self.directory = directory
        self.agents: dict[str, NodeAgent] = {}

    @property
    def client(self) -> ApiClient:
        return self._client

    def where(self, pod) -> Path:
        """The pod's directory on this machine."""
        return self.directory / pod["spec"]["nodeName"] / "pods" / pod["metadata"]["uid"]

    def log_of(self, pod, container="main") -> str:
        files = sorted((self.where(pod) / "logs" / container).glob("*.log"), key=lambda path: int(path.stem))
        return "".join(line.split(" ", 3)[3] + "\n" for line in files[-1].read_text().splitlines()) if files else ""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def station(tmp_path_factory, request) -> AsyncIterator[Station]:
    directory = tmp_path_factory.mktemp("station")
    real = request.config.getoption("--cluster") == "assets"
    provider: Provider = EnvtestProvider(directory) if real else EmbeddedProvider(directory, in_memory=True)
    control_plane = await provider.start()
    network = ClusterNetwork()
    async with ApiClient(control_plane.connection) as client:
        await client.wait_ready()
        made = Station(client, directory)
        settings = AgentSettings(directory, control_plane.kubelet, renew_seconds=0.2, restart_backoff_seconds=0.2)
        # The options of a mount end at commas, so on the third node the trial fails, as it does for other users.
        for index, (name, isolate) in enumerate((("mounted", True), ("plain", False), ("comma,", True))):
            own = replace(settings, directory=directory / name, isolate=isolate)
            spec = NodeSpec(name.rstrip(","))
            made.agents[spec.name] = NodeAgent(client, spec, network.part(index, 3), own)
            await made.agents[spec.name].start()
        yield made
        for agent in made.agents.values():
            await agent.stop()
        assert not list(directory.glob("*/pods/*/root/*/*")), "views are built in private, and go with their processes"
    await provider.stop()
    network.close()


@pytest.fixture
def mounted(station) -> NodeAgent:
    if not station.agents["mounted"].isolated:
        pytest.skip("this user may not mount: needs root with CAP_SYS_ADMIN")
    return station.agents["mounted"]


def exists(path: str) -> bool:
    """Whether there is anything of that name on the machine itself."""
    return os.path.lexists(path)


def mounts(**paths):
    return [{"name": name, "mountPath": path} for name, path in paths.items()]


async def test_nodes_say_what_their_containers_see(station):
    for name, agent in station.agents.items():
        node = await station.client.get(NODES, name)
        expected = "mounted" if agent.isolated else "rewritten"
        assert node["metadata"]["annotations"][FILE_SYSTEM_ANNOTATION] == expected
    assert not station.agents["plain"].isolated


async def test_where_mounting_fails_pods_run_nevertheless(station):
    assert not station.agents["comma"].isolated
    spec = {"nodeName": "comma", "volumes": [{"name": "e", "emptyDir": {}}]}
    await station.pod("unmounted", "sh", "-c", 'echo "$1"', "sh", "/work/x", volumeMounts=mounts(e="/work"), spec=spec)
    pod = await station.ended("unmounted")
    assert (await station.client.get(PODS, "unmounted", "default"))["status"]["phase"] == "Succeeded"
    files = list((station.directory / "comma,").glob(f"pods/{pod['metadata']['uid']}/logs/main/0.log"))
    assert "/volumes/e/x" in files[0].read_text()


@pytest.mark.parametrize("node", ["mounted", "plain"])
async def test_volumes_are_found_on_either_kind_of_node(station, node):
    await station.client.create(CONFIG_MAPS, {"metadata": {"name": node}, "data": {"a": "text"}}, "default")
    spec = {"nodeName": node, "volumes": [{"name": "c", "configMap": {"name": node}}, {"name": "e", "emptyDir": {}}]}
    where = mounts(c="/etc/conf", e="/work")
    await station.pod(
        f"v-{node}", "sh", "-c", 'cat "$1" > "$OUT"; cat "$OUT"', "sh", "/etc/conf/a",
        env=[{"name": "OUT", "value": "/work/out"}], volumeMounts=where, spec=spec,
    )  # fmt: skip
    pod = await station.ended(f"v-{node}")
    assert station.log_of(pod) == "text\n"
    assert (station.where(pod) / "volumes" / "e" / "out").read_text() == "text"


async def test_real_mount_paths_leave_nothing_on_the_machine(station, mounted):
    script = """
        echo changed > /etc/meshwright-test; echo kept > /scratch-test/deep/file; echo bye > /dev/termination-log
        cat /opt/never/conf/a /var/run/secret-test/a; (echo x > /opt/never/conf/new) 2>/dev/null || echo read-only
        df -P /dev/shm | tail -1 | cut -d' ' -f1; hostname; pwd; cat /scratch-test/deep/file
    """
    await station.client.create(CONFIG_MAPS, {"metadata": {"name": "real"}, "data": {"a": "text\n"}}, "default")
    volumes = [
        {"name": "c", "configMap": {"name": "real"}},
        {"name": "e", "emptyDir": {}},
        {"name": "m", "emptyDir": {"medium": "Memory"}},
    ]
    where = [
        {"name": "c", "mountPath": "/opt/never/conf", "readOnly": True},
        *mounts(e="/scratch-test/deep", m="/dev/shm"),
        {"name": "c", "mountPath": "/var/run/secret-test"},
    ]
    spec = {"nodeName": "mounted", "volumes": volumes, "hostname": "short"}
    await station.pod("real", script, volumeMounts=where, spec=spec, workingDir="/made/for/it")
    pod = await station.ended("real")
    assert station.log_of(pod).splitlines() == [
        "text", "text", "read-only",
        "tmpfs", "short", "/made/for/it", "kept",
    ]  # fmt: skip
    assert pod["status"]["containerStatuses"][0]["state"]["terminated"]["message"] == "bye\n"
    for path in ("/etc/meshwright-test", "/scratch-test", "/opt/never", "/dev/termination-log", "/made"):
        assert not exists(path), path
    assert not exists("/run/secret-test")
    memory = (station.where(pod) / "volumes" / "m").readlink()
    assert not memory.exists(), "memory is given back at the end"


async def test_pods_do_not_see_each_others_files(station, mounted):
    for name in ("one", "other"):
        script = (
            f"test ! -e /tmp/meshwright-mark && echo {name} > /tmp/meshwright-mark; sleep 0.3; cat /tmp/meshwright-mark"
        )
        await station.pod(name, script, spec={"nodeName": "mounted"})
    for name in ("one", "other"):
        assert station.log_of(await station.ended(name)) == f"{name}\n"
    assert not exists("/tmp/meshwright-mark")


async def test_commands_of_exec_see_what_the_container_sees(station, mounted):
    probe = {"exec": {"command": ["sh", "-c", "test -e /scratch-x/ready && test $(hostname) = beside"]}}
    await station.pod(
        "beside", "touch /scratch-x/ready; sleep 60", readinessProbe={**probe, "periodSeconds": 1},
        volumeMounts=mounts(e="/scratch-x"), spec={"nodeName": "mounted", "volumes": [{"name": "e", "emptyDir": {}}]},
    )  # fmt: skip
    await station.pod_when("beside", lambda pod: (pod["status"].get("containerStatuses") or [{}])[0].get("ready"))
    await station.delete("beside", grace_seconds=0)


async def test_a_view_that_cannot_be_made_is_explained(tmp_path, mounted):
    view = FileSystemView(str(tmp_path), "x", [Mount("/does/not/exist", "/data")])
    with pytest.raises(StartError, match="mount .*/view/data: No such file"):
        await Process.start(ProcessSpec(["true"], {"PATH": os.environ["PATH"]}, Path("/"), view=view))


LOOK_UP = """
import socket, sys, time
def look(name):
    try:
        return sorted({item[4][0] for item in socket.getaddrinfo(name, 80, type=socket.SOCK_STREAM)})
    except OSError:
        return []
for name in sys.argv[1:]:
    wanted, name = name.split(":")
    while len(look(name)) != int(wanted):
        time.sleep(0.05)
    print(name, *look(name), flush=True)
"""


async def test_names_of_a_headless_service(station, mounted):
    spec = {"clusterIP": "None", "selector": {"app": "gang"}, "ports": [{"port": 80}], "publishNotReadyAddresses": True}
    await station.client.create(SERVICES, {"metadata": {"name": "gang"}, "spec": spec}, "default")
    names = ["1:w0.gang", "1:w1.gang.default", "1:w1.gang.default.svc", "1:w1.gang.default.svc.cluster.local"]
    command = ["python", "-c", LOOK_UP, *names, "2:gang", "2:gang.default.svc", "1:w0"]
    for name in ("w0", "w1"):
        place = {"nodeName": "mounted", "hostname": name, "subdomain": "gang"}
        words = command if name == "w0" else ["sleep", "60"]
        never = {"exec": {"command": ["false"]}}
        await station.pod(name, *words, spec=place, meta={"labels": {"app": "gang"}}, readinessProbe=never)
    first, second = await station.ended("w0"), await station.running("w1")
    one, two = first["status"]["podIP"], second["status"]["podIP"]
    found = dict(line.split(" ", 1) for line in station.log_of(first).splitlines())
    both = " ".join(sorted((one, two)))
    assert found["w0.gang"] == found["w0"] == one
    assert found["w1.gang.default.svc.cluster.local"] == found["w1.gang.default"] == two
    assert found["gang"] == found["gang.default.svc"] == both
    await station.delete("w1", grace_seconds=0)


async def test_names_follow_readiness(station, mounted):
    spec = {"clusterIP": "None", "selector": {"app": "web"}, "ports": [{"port": 80}]}
    await station.client.create(SERVICES, {"metadata": {"name": "web"}, "spec": spec}, "default")
    flag = {"exec": {"command": ["test", "-e", "/flag/up"]}}
    await station.pod(
        "web-0", "sleep 60", readinessProbe={**flag, "periodSeconds": 1, "failureThreshold": 1},
        volumeMounts=mounts(f="/flag"), meta={"labels": {"app": "web"}},
        spec={"nodeName": "mounted", "volumes": [{"name": "f", "emptyDir": {}}]},
    )  # fmt: skip
    web = await station.running("web-0")
    await station.pod("asks", "python", "-c", LOOK_UP, "0:web", "1:web", "0:web.default", spec={"nodeName": "mounted"})
    asks = await station.running("asks")

    async def said(count):
        return len(station.log_of(asks).splitlines()) >= count

    await station.until(lambda: said(1))
    flag_file = station.where(web) / "volumes" / "f" / "up"
    flag_file.touch()
    await station.until(lambda: said(2))
    flag_file.unlink()
    asks = await station.ended("asks")
    assert station.log_of(asks).splitlines() == ["web", f"web {web['status']['podIP']}", "web.default"]
    await station.delete("web-0", grace_seconds=0)


@pytest.mark.parametrize("node", ["mounted", "plain"])
async def test_a_service_account_reaches_the_api_server(station, node):
    if node == "mounted" and not station.agents[node].isolated:
        pytest.skip("this user may not mount: needs root with CAP_SYS_ADMIN")
    await station.client.create(ACCOUNTS, {"metadata": {"name": f"robot-{node}"}}, "default")
    script = """
import asyncio, os
from kubernetes.aio import client, config
async def main():
    loaded = client.Configuration()
    if "KUBERNETES_SERVICE_HOST" in os.environ:
        config.load_incluster_config(client_configuration=loaded)
    else:
        await config.load_kube_config(client_configuration=loaded)
    async with client.ApiClient(loaded) as api:
        review = await client.AuthenticationV1Api(api).create_self_subject_review({})
        print(review.status.user_info.username)
asyncio.run(main())
"""
    await station.pod(
        f"sa-{node}", "python", "-c", script, spec={"nodeName": node, "serviceAccountName": f"robot-{node}"}
    )
    pod = await station.ended(f"sa-{node}", 30)
    assert station.log_of(pod) == f"system:serviceaccount:default:robot-{node}\n"


async def test_an_image_named_as_a_program_runs_it(station):
    await station.pod(
        "image", "x", command=None, args=["-c", "print('ran')"], image="registry:5000/tools/python:3",
        spec={"nodeName": "plain"},
    )  # fmt: skip
    assert station.log_of(await station.ended("image")) == "ran\n"


async def lease(station, node):
    return (await station.client.get(LEASES, node, "kube-node-lease"))["spec"]["renewTime"]


def processes_of(pod) -> list[int]:
    needle = f"/pods/{pod['metadata']['uid']}/home".encode()
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and needle in (entry / "environ").read_bytes():
                found.append(int(entry.name))
    return found


def alive(pod, station) -> bool:
    return bool(processes_of(pod))


@pytest.mark.parametrize("node", [pytest.param("mounted", marks=pytest.mark.long), "plain"])
async def test_a_partitioned_node_keeps_its_processes_and_catches_up(station, node):
    agent = station.agents[node]
    for name in ("stays", "ends", "goes"):
        script = "trap 'exit 3' USR1; while :; do sleep 0.05; done" if name == "ends" else "sleep 60"
        await station.pod(f"{name}-{node}", script, spec={"nodeName": node})
    stays, goes, ends = [await station.running(f"{name}-{node}") for name in ("stays", "goes", "ends")]
    await agent.partition()
    before = await lease(station, node)
    await station.delete(f"goes-{node}", grace_seconds=0)
    await station.pod(f"late-{node}", "true", spec={"nodeName": node})
    for process in processes_of(ends):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGUSR1)
    await asyncio.sleep(1)
    assert await lease(station, node) == before
    assert alive(stays, station)
    assert alive(goes, station), "nobody told the node that its pod was deleted"
    assert (await station.client.get(PODS, f"ends-{node}", "default"))["status"]["phase"] == "Running"
    assert (await station.client.get(PODS, f"late-{node}", "default"))["status"]["phase"] == "Pending"
    await agent.recover()
    assert (await station.ended(f"ends-{node}"))["status"]["phase"] == "Failed"
    assert (await station.ended(f"late-{node}"))["status"]["phase"] == "Succeeded"

    async def dead():
        return not alive(goes, station)

    await station.until(dead)
    assert alive(stays, station)
    assert await lease(station, node) > before
    pod = await station.client.get(PODS, f"stays-{node}", "default")
    assert pod["status"]["containerStatuses"][0]["restartCount"] == 0
    await station.delete(f"stays-{node}", grace_seconds=0)


@pytest.mark.parametrize("node", ["mounted", "plain"])
async def test_power_off_and_recover(station, node):
    agent = station.agents[node]
    for name, policy in (("again", "Always"), ("lost", "Never")):
        spec = {"nodeName": node, "restartPolicy": policy, "terminationGracePeriodSeconds": 0}
        await station.pod(f"{name}-{node}", "trap '' TERM; sleep 60", spec=spec)
    again, lost = [await station.running(f"{name}-{node}") for name in ("again", "lost")]
    await agent.power_off()
    assert not alive(again, station)
    assert not alive(lost, station)
    assert (await station.client.get(PODS, f"again-{node}", "default"))["status"]["phase"] == "Running"
    await agent.recover()
    lost = await station.ended(f"lost-{node}")
    assert lost["status"]["containerStatuses"][0]["state"]["terminated"]["reason"] == "ContainerStatusUnknown"

    def restarted(pod):
        status = pod["status"]["containerStatuses"][0]
        return status["restartCount"] == 1 and "running" in status["state"]

    await station.pod_when(f"again-{node}", restarted)
    await agent.recover()
    assert alive(again, station), "recovering a node that is well does nothing"
    await station.delete(f"again-{node}", grace_seconds=0)


@pytest.mark.parametrize("node", [pytest.param("mounted", marks=pytest.mark.long), "plain"])
async def test_a_container_is_killed_by_name(station, node):
    spec = {"nodeName": node, "restartPolicy": "OnFailure"}
    await station.pod(f"victim-{node}", "sleep 60", spec=spec)
    await station.running(f"victim-{node}")
    station.agents[node].signal("default", f"victim-{node}", "main")

    def restarted(pod):
        status = pod["status"]["containerStatuses"][0]
        return status["restartCount"] == 1 and "running" in status["state"]

    pod = await station.pod_when(f"victim-{node}", restarted)
    assert pod["status"]["containerStatuses"][0]["lastState"]["terminated"]["exitCode"] == 137
    station.agents[node].signal("default", f"victim-{node}", number=signal.SIGTERM)
    await station.pod_when(f"victim-{node}", lambda pod: pod["status"]["containerStatuses"][0]["restartCount"] == 2)
    with pytest.raises(KeyError, match="no container"):
        station.agents[node].signal("default", f"victim-{node}", "nobody")
    await station.delete(f"victim-{node}", grace_seconds=0)
