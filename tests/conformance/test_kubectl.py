"""kubectl against the server: the commands people type."""

import asyncio
import json
import re
import shutil

import pytest

from meshwright_local.kube.kubeconfig import Connection, write_kubeconfig
from tests.patience import patient

pytestmark = pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")


@pytest.fixture
def kubectl(api, tmp_path):
    path = tmp_path / "kubeconfig"
    write_kubeconfig(path, Connection(api.server.url, api.server.token, api.server.ca))

    async def run(*words, stdin=None, code=0):
        process = await asyncio.create_subprocess_exec(
            *("kubectl", "--kubeconfig", path, "--cache-dir", tmp_path / "cache", "-n", api.namespace, *words),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        out, _ = await asyncio.wait_for(process.communicate(stdin and stdin.encode()), patient(60))
        assert process.returncode == code, out.decode()
        return out.decode()

    return run


def manifest(obj):
    return json.dumps(obj)


async def test_create_apply_get_delete(api, kubectl):
    first = manifest(api.config_map("c", {"a": "b"}))
    assert "created" in await kubectl("apply", "-f", "-", stdin=first)
    assert "unchanged" in await kubectl("apply", "-f", "-", stdin=first)
    assert "serverside-applied" in await kubectl("apply", "--server-side", "-f", "-", stdin=first)
    assert "AlreadyExists" in await kubectl("create", "-f", "-", stdin=first, code=1)
    assert (await kubectl("get", "cm", "c")).splitlines()[0].split() == ["NAME", "DATA", "AGE"]
    assert "labeled" in await kubectl("label", "cm", "c", "x=y")
    assert "No resources found" in await kubectl("get", "cm", "-l", "a=nope")
    patch = '[{"op":"add","path":"/data/z","value":"1"}]'
    assert "patched" in await kubectl("patch", "cm", "c", "--type=json", "-p", patch)
    assert "deleted" in await kubectl("delete", "cm", "c", "--timeout=200s")


@pytest.mark.parametrize("side", ["--server-side", "--server-side=false"])
async def test_a_kind_without_a_definition_is_named(kubectl, side):
    """As when the definition of ParallelTrainingJob is not installed."""
    job = manifest({"apiVersion": "none.example.com/v1", "kind": "Job", "metadata": {"name": "a"}})
    shown = await kubectl("apply", side, "-f", "-", stdin=job, code=1)
    assert 'no matches for kind "Job" in version "none.example.com/v1"' in shown


async def test_typed_commands_speak_protobuf(api, kubectl):
    assert "created" in await kubectl("create", "configmap", "made", "--from-literal=a=b")
    assert "created" in await kubectl("create", "secret", "generic", "s", "--from-literal=a=b")
    assert "created" in await kubectl("create", "serviceaccount", "sa")
    assert "created" in await kubectl("create", "role", "r", "--verb=get", "--resource=pods")
    _, obj = await api.call("GET", f"{api.maps}/made")
    assert obj["data"] == {"a": "b"}
    assert (await kubectl("auth", "can-i", "create", "pods")).strip() == "yes"
    account = f"system:serviceaccount:{api.namespace}:sa"
    assert (await kubectl("auth", "can-i", "create", "pods", "--as", account, code=1)).strip() == "no"
    assert len((await kubectl("create", "token", "sa")).split(".")) == 3


async def test_explain_lists_the_fields_of_built_in_kinds(api, kubectl):
    pod = await kubectl("explain", "pod")
    assert "KIND:" in pod
    assert re.search(r"^  spec\s+<PodSpec>", pod, re.MULTILINE)
    ports = await kubectl("explain", "pod.spec.containers.ports")
    assert re.search(r"^  containerPort\s+<integer> -required-", ports, re.MULTILINE)
    assert "maxUnavailable" in await kubectl("explain", "deployment.spec.strategy", "--recursive")


async def test_custom_resources(api, runs, kubectl):
    run = manifest(api.run("demo"))
    assert "created" in await kubectl("apply", "-f", "-", stdin=run)
    assert (await kubectl("get", "runs")).split()[:4] == ["NAME", "WORKERS", "PHASE", "READY"]
    assert "backoffLimit" in await kubectl("explain", "run.spec")
    assert "Workers" in await kubectl("describe", "run", "demo")
    status = '{"status":{"phase":"Running"}}'
    assert "patched" in await kubectl("patch", "run", "demo", "--subresource=status", "--type=merge", "-p", status)
    assert "met" in await kubectl("wait", "run/demo", "--for=jsonpath={.status.phase}=Running", "--timeout=200s")
    assert "scaled" in await kubectl("scale", "run/demo", "--replicas=3")
    bad = manifest(api.run("bad", workers=0))
    assert "spec.workers: Invalid value: 0" in await kubectl("create", "--validate=false", "-f", "-", stdin=bad, code=1)
    unknown = manifest(api.run("bad", bogus=1))
    assert 'unknown field "spec.bogus"' in await kubectl("create", "-f", "-", stdin=unknown, code=1)
    assert "deleted" in await kubectl("delete", "run", "demo", "--timeout=200s")


async def test_pods(api, kubectl):
    overrides = '{"spec":{"schedulerName":"nobody"}}'
    await kubectl("run", "p1", "--image=busybox", "--restart=Never", f"--overrides={overrides}", "--", "sleep", "1")
    assert (await kubectl("get", "pods")).split()[:5] == ["NAME", "READY", "STATUS", "RESTARTS", "AGE"]
    assert "Pending" in await kubectl("get", "pod", "p1", "-o", "wide")
    assert "busybox" in await kubectl("describe", "pod", "p1")
    assert "deleted" in await kubectl("delete", "pod", "p1", "--timeout=200s")


async def test_namespaces(api, kubectl):
    name = f"{api.namespace}-t"
    assert "created" in await kubectl("create", "ns", name)
    assert "deleted" in await kubectl("delete", "ns", name, "--timeout=200s")


async def test_typed_commands_with_nested_objects(api, kubectl):
    """These commands send protobuf, where JSON's inlined fields are messages of their own."""
    rule = ("--rule", "example.com/path*=web:80")
    assert "created" in await kubectl("create", "ingress", "i", *rule)
    shown = json.loads(await kubectl("get", "ingress", "i", "-o", "json"))
    assert shown["spec"]["rules"][0]["http"]["paths"][0]["backend"]["service"]["name"] == "web"
    variable = {"name": "A", "valueFrom": {"configMapKeyRef": {"name": "c", "key": "k"}}}
    probe = {"exec": {"command": ["true"]}}
    container = {"name": "a", "image": "b", "env": [variable], "livenessProbe": probe}
    volumes = [{"name": "v", "configMap": {"name": "c"}}, {"name": "e", "emptyDir": {}}]
    pod = {"restartPolicy": "Never", "containers": [container], "volumes": volumes}
    spec = {
        "schedule": "0 0 1 1 *",
        "suspend": True,
        "jobTemplate": {"spec": {"suspend": True, "template": {"spec": pod}}},
    }
    cron = {"apiVersion": "batch/v1", "kind": "CronJob", "metadata": {"name": "c"}, "spec": spec}
    assert "created" in await kubectl("apply", "-f", "-", stdin=manifest(cron))
    assert "created" in await kubectl("create", "job", "j", "--from=cronjob/c")
    made = json.loads(await kubectl("get", "job", "j", "-o", "json"))["spec"]["template"]["spec"]
    assert [volume.get("configMap", {}).get("name") for volume in made["volumes"]] == ["c", None]
    assert made["containers"][0]["env"] == [variable]
    assert made["containers"][0]["livenessProbe"]["exec"] == {"command": ["true"]}
