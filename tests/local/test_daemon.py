"""The cluster as a process: ready, stopped, killed, started again."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from meshwright.local.client import ApiClient
from meshwright.local.commands import local
from meshwright.local.connection import Connection
from meshwright.local.daemon import holder
from meshwright.local.resources import PODS

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
    deadline = time.monotonic() + seconds
    while not (found := look()):
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(0.02)
    return found


def start(directory, *words):
    (directory / "ready").unlink(missing_ok=True)
    process = subprocess.Popen(
        [sys.executable, "-m", "meshwright.local.daemon", "--directory", str(directory), "--racks=1", *words],
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    wait(lambda: (directory / "ready").exists() or process.poll() is not None)
    assert process.poll() is None, process.stderr.read().decode()
    return process


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


async def run_pod(directory):
    async with ApiClient(Connection.from_kubeconfig(directory / "kubeconfig")) as client:
        await client.create(PODS, POD, "default")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
async def test_no_process_outlives_the_daemon(tmp_path, number):
    daemon = start(tmp_path)
    try:
        assert (tmp_path / "kubeconfig").stat().st_mode & 0o777 == 0o600
        assert json.loads((tmp_path / "ready").read_text())["pid"] == daemon.pid == holder(tmp_path)
        await run_pod(tmp_path)
        wait(lambda: list(tmp_path.glob("nodes/*/pods/*/home/pid")))
        wait(lambda: len(processes_below(tmp_path)) >= 2)
        daemon.send_signal(number)
        assert daemon.wait(10) == (0 if number == signal.SIGTERM else -signal.SIGKILL)
        wait(lambda: not processes_below(tmp_path), 2)
        assert holder(tmp_path) is None
        if number == signal.SIGTERM:
            assert not (tmp_path / "ready").exists()
        # The second start finds the pod that the first one lost.
        daemon = start(tmp_path)
        async with ApiClient(Connection.from_kubeconfig(tmp_path / "kubeconfig")) as client:
            deadline = time.monotonic() + 10
            while (await client.get(PODS, "p", "default"))["status"].get("phase") != "Failed":
                assert time.monotonic() < deadline
    finally:
        daemon.terminate()
        daemon.wait(10)


def test_one_daemon_per_directory(tmp_path):
    daemon = start(tmp_path)
    try:
        second = subprocess.run(
            [sys.executable, "-m", "meshwright.local.daemon", "--directory", str(tmp_path)],
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
        assert second.returncode == 1
        assert f"pid {daemon.pid}" in second.stderr
    finally:
        daemon.terminate()
        assert daemon.wait(10) == 0


def test_commands(tmp_path):
    runner = CliRunner()

    def run(*words):
        return runner.invoke(local, [*words, "--directory", str(tmp_path)], catch_exceptions=False)

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
    assert "no cluster runs" in run("down").output


def test_a_bad_shape_is_refused(tmp_path):
    refused = subprocess.run(
        [sys.executable, "-m", "meshwright.local.daemon", "--directory", str(tmp_path), "--racks=0"],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert refused.returncode == 2
    assert "--racks" in refused.stderr
