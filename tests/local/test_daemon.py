"""The cluster as a process: ready, stopped, killed, started again."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from meshwright_cli.main import main
from meshwright_local.daemon import daemon_pid
from meshwright_local.kube.client import ApiClient
from meshwright_local.kube.kubeconfig import Connection
from meshwright_local.kube.resources import NODES, PODS
from tests.patience import patient

POD = {
    "metadata": {"name": "p"},
    "spec": {
        "restartPolicy": "Never",
        "containers": [
            {
                "name": "main",
                "image": "none",
                "command": ["sh", "-c", '(setsid sleep 987.5 &); echo "$$$$" > pid; exec sleep 60'],
            }
        ],
    },
}


def wait(look, seconds=20.0):
    deadline = time.monotonic() + patient(seconds)
    while not (found := look()):
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(0.02)
    return found


def start(directory, *words):
    (directory / "ready").unlink(missing_ok=True)
    process = subprocess.Popen(
        [sys.executable, "-m", "meshwright_local.daemon", "--directory", str(directory), "--racks=1", *words],
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    wait(lambda: (directory / "ready").exists() or process.poll() is not None)
    assert process.poll() is None, process.stderr.read().decode()
    return process


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """The directory of a running cluster, and its daemon, which ends orderly."""
    directory = tmp_path_factory.mktemp("cluster")
    daemon = start(directory, "--nodes-per-rack=1")
    try:
        yield directory, daemon
    finally:
        daemon.terminate()
        code = daemon.wait(patient(10))
    assert code == 0


def processes_below(directory):
    """Processes whose working directory lies in the cluster's."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if os.readlink(entry / "cwd").startswith(str(directory)):
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


async def create(directory, body):
    async with ApiClient(Connection.from_kubeconfig(directory / "kubeconfig")) as client:
        await client.create(PODS, body, "default")


@pytest.mark.parametrize("number", [pytest.param(signal.SIGTERM, marks=pytest.mark.long), signal.SIGKILL])
async def test_no_process_outlives_the_daemon(tmp_path, number):
    daemon = start(tmp_path)
    try:
        assert (tmp_path / "kubeconfig").stat().st_mode & 0o777 == 0o600
        assert json.loads((tmp_path / "ready").read_text())["pid"] == daemon.pid == daemon_pid(tmp_path)
        await create(tmp_path, POD)
        wait(lambda: list(tmp_path.glob("nodes/*/pods/*/home/pid")))
        wait(lambda: len(processes_below(tmp_path)) >= 2)
        daemon.send_signal(number)
        assert daemon.wait(patient(10)) == (0 if number == signal.SIGTERM else -signal.SIGKILL)
        wait(lambda: not processes_below(tmp_path), 2)
        assert daemon_pid(tmp_path) is None
        if number == signal.SIGTERM:
            assert not (tmp_path / "ready").exists()
        # The second start finds the pod that the first one lost.
        daemon = start(tmp_path)
        async with ApiClient(Connection.from_kubeconfig(tmp_path / "kubeconfig")) as client:
            deadline = time.monotonic() + patient(10)
            while (await client.get(PODS, "p", "default"))["status"].get("phase") != "Failed":
                assert time.monotonic() < deadline
    finally:
        daemon.terminate()
        daemon.wait(patient(10))


def test_one_daemon_per_directory(cluster):
    directory, daemon = cluster
    second = subprocess.run(
        [sys.executable, "-m", "meshwright_local.daemon", "--directory", str(directory)],
        capture_output=True,
        text=True,
        timeout=patient(30),
        check=False,
    )
    assert second.returncode == 1
    assert f"pid {daemon.pid}" in second.stderr


def test_commands(tmp_path):
    runner = CliRunner()

    def run(*words):
        return runner.invoke(main, ["local", *words, "--directory", str(tmp_path)], catch_exceptions=False)

    refused = run("status")
    assert refused.exit_code == 1
    assert "start one with" in refused.output
    try:
        started = run("up", "--racks", "1", "--nodes-per-rack", "1")
        assert started.exit_code == 0, started.output
        assert f"export KUBECONFIG={tmp_path}/kubeconfig" in started.output
        assert run("up").exit_code == 1
        assert run("kubeconfig").output.strip() == f"{tmp_path}/kubeconfig"
        shown = run("status").output
        assert "rack0-node0" in shown
        assert "0/2" in shown
    finally:
        stopped = run("down")
    assert stopped.output == "stopped\n"
    assert "no cluster is running" in run("down").output


def ready_of(directory, name):
    async def look():
        async with ApiClient(Connection.from_kubeconfig(directory / "kubeconfig")) as client:
            node = await client.find(NODES, name)
            return node and {item["type"]: item["status"] for item in node["status"]["conditions"]}["Ready"]

    return asyncio.run(look())


def test_nodes_fail_and_processes_are_killed_on_order(cluster):
    runner, (directory, _) = CliRunner(), cluster

    def run(*words):
        return runner.invoke(main, ["local", *words, "--directory", str(directory)], catch_exceptions=False)

    async def restarts():
        async with ApiClient(Connection.from_kubeconfig(directory / "kubeconfig")) as client:
            found = await client.get(PODS, "p", "default")
            statuses = found["status"].get("containerStatuses") or [{}]
            return statuses[0].get("restartCount") if "running" in statuses[0].get("state", {}) else None

    assert (directory / "control.sock").stat().st_mode & 0o777 == 0o600
    body = {"metadata": {"name": "p"}, "spec": {**POD["spec"], "restartPolicy": "Always"}}
    asyncio.run(create(directory, body))
    wait(lambda: asyncio.run(restarts()) == 0)
    assert run("chaos", "kill", "p").exit_code == 0
    wait(lambda: asyncio.run(restarts()) == 1)
    for action in ("partition", "power-off"):
        assert run("node", action, "rack0-node0").exit_code == 0
        assert run("node", "recover", "rack0-node0").exit_code == 0
        wait(lambda: ready_of(directory, "rack0-node0") == "True")
    assert run("node", "add", "extra", "--rack", "rack7").exit_code == 0
    assert ready_of(directory, "extra") == "True"
    assert "a node of that name already exists" in run("node", "add", "extra").output
    assert run("node", "remove", "extra").exit_code == 0
    assert ready_of(directory, "extra") is None
    assert "no simulated node 'extra': there are rack0-node0" in run("node", "recover", "extra").output
    assert "no simulated node runs a pod default/q" in run("chaos", "kill", "q").output


def test_rules_reach_the_api_server(cluster):
    runner, (directory, _) = CliRunner(), cluster

    def run(*words):
        return runner.invoke(main, ["local", "chaos", *words, "--directory", str(directory)], catch_exceptions=False)

    if "does not support fault injection" in run("list").output:
        pytest.skip("this API server has no /debug/chaos")
    matches = ("--match", "resource=configmaps", "--match", "verbs=create,update", "--match", "probability=0.5")
    added = run("add", "answer", "code=429", "retryAfter=1", *matches)
    assert json.loads(added.output)["match"]["verbs"] == ["create", "update"]
    assert run("add", "delay", "seconds=0.01").exit_code == 0
    kinds = [json.loads(line)["effect"]["type"] for line in run("list").output.splitlines()]
    assert kinds == ["answer", "delay"]
    refused = run("add", "delay", "minutes=1")
    assert refused.exit_code == 1
    assert "minutes" in refused.output
    assert run("clear").exit_code == 0
    assert run("list").output == ""


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--with-nodes"], "--with-nodes: only with --provider kubeconfig"),
        (["--provider=kubeconfig"], "needs --existing FILE"),
    ],
)
def test_incompatible_options_are_rejected(tmp_path, monkeypatch, words, message):
    monkeypatch.delenv("KUBECONFIG", raising=False)
    refused = CliRunner().invoke(main, ["local", "up", "--directory", str(tmp_path), *words])
    assert refused.exit_code == 2
    assert message in refused.output


def test_an_invalid_shape_is_rejected(tmp_path):
    refused = subprocess.run(
        [sys.executable, "-m", "meshwright_local.daemon", "--directory", str(tmp_path), "--racks=0"],
        capture_output=True,
        text=True,
        timeout=patient(30),
        check=False,
    )
    assert refused.returncode == 2
    assert "--racks" in refused.stderr
