"""An API server for tests of the command line: the embedded one in this process, or the binaries of KUBEBUILDER_ASSETS.

No operator runs, so tests write the status that one would write.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from click.testing import CliRunner, Result

from meshwright.api.labels import API_VERSION, KIND
from meshwright_cli.demo import setup
from meshwright_cli.main import main
from meshwright_local.kube.client import ApiClient, ApiError
from meshwright_local.kube.kubeconfig import write_kubeconfig
from meshwright_local.providers.embedded import EmbeddedProvider
from tests.conformance.conftest import Background

TIME = "2026-01-02T03:04:05Z"
PROGRAM = Path(sys.executable).with_name("meshwright")


@dataclass
class LiveServer:
    """A running API server."""

    directory: Path
    background: Background
    client: ApiClient

    @property
    def kubeconfig(self) -> Path:
        return self.directory / "kubeconfig"

    def wait(self, work: Any) -> Any:
        """The result of a coroutine in the server's loop."""
        return self.background.wait(work)

    def call(self, method: str, path: str, body: Any = None, content_type: str = "application/json") -> Any:
        """Send a request as the administrator."""
        params = {"fieldManager": "test", "force": "true"} if "apply" in content_type else None
        return self.wait(self.client.request(method, path, params=params, body=body, content_type=content_type))

    def apply(self, path: str, body: dict[str, Any]) -> Any:
        """Apply an object, and its status if it has one."""
        name = body["metadata"]["name"]
        made = self.call("PATCH", f"{path}/{name}", body, "application/apply-patch+yaml")
        if "status" in body:
            status = {"apiVersion": body["apiVersion"], "kind": body["kind"], "metadata": {"name": name}}
            patch = {**status, "status": body["status"]}
            made = self.call("PATCH", f"{path}/{name}/status", patch, "application/merge-patch+json")
        return made

    def patch(self, path: str, body: dict[str, Any]) -> Any:
        """Merge changes into an object."""
        return self.call("PATCH", path, body, "application/merge-patch+json")

    def exists(self, path: str) -> bool:
        try:
            self.call("GET", path)
        except ApiError as error:
            if error.status == 404:
                return False
            raise
        return True

    def cli(
        self, *arguments: str, code: int | None = 0, text: str | None = None, kubeconfig: Path | None = None
    ) -> Result:
        """Run a command; fails if its exit code is another."""
        options = ["--kubeconfig", str(kubeconfig or self.kubeconfig)]
        result = CliRunner().invoke(main, [*arguments, *options], input=text)
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        assert code is None or result.exit_code == code, (arguments, result.exit_code, result.output)
        return result

    def as_user(self, name: str) -> Path:
        """A kubeconfig in which the administrator impersonates a user without any rights."""
        config = yaml.safe_load(self.kubeconfig.read_text())
        config["users"][0]["user"]["as"] = name
        file = self.directory / f"{name}.kubeconfig"
        file.write_text(yaml.safe_dump(config))
        return file


@contextmanager
def live_server(directory: Path, kind: str, *, definition: bool = True) -> Iterator[LiveServer]:
    """A server with, or without, the definition."""
    background = Background()
    if kind == "assets":
        from meshwright_local.providers.envtest import EnvtestProvider

        provider: Any = EnvtestProvider(directory)
    else:
        provider = EmbeddedProvider(directory, in_memory=True)
    try:
        control_plane = background.wait(provider.start())
        write_kubeconfig(directory / "kubeconfig", control_plane.connection)
        client = ApiClient(control_plane.connection)
        background.wait(client.wait_ready())
        if definition:
            background.wait(setup.install_crd(client))
        yield LiveServer(directory, background, client)
        background.wait(client.close())
    finally:
        background.wait(provider.stop())
        background.stop()


def job(name: str, **spec: Any) -> dict[str, Any]:
    """A small valid job."""
    base: dict[str, Any] = {
        "replicas": 2,
        "model": {"layers": 2, "hiddenSize": 32, "intermediateSize": 64, "heads": 2, "vocabSize": 260},
        "data": {"source": "PythonStdlib"},
        "training": {"steps": 60, "globalBatchSize": 8, "sequenceLength": 32},
        "parallelism": {"tensor": 2, "pipeline": 1, "microBatches": 2},
        "workers": {"image": "meshwright-worker:0.1.0", "gpusPerWorker": 2},
        "checkpoint": {"claimName": "runs"},
    }
    return {"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": name}, "spec": {**base, **spec}}


def condition(kind: str, status: str, reason: str, message: str = "", generation: int = 1) -> dict[str, Any]:
    return {
        "type": kind,
        "status": status,
        "reason": reason,
        "message": message,
        "observedGeneration": generation,
        "lastTransitionTime": TIME,
    }


def running(step: int = 30, **more: Any) -> dict[str, Any]:
    """The status of a job that trains on two nodes."""
    workers = [
        {"worker": w, "incarnation": 0, "pod": f"lm-w{w}-0", "node": f"node{w}", "ranks": f"{2 * w}-{2 * w + 1}",
         "domain": f"node{w}-nvlink", "rack": "rack0"}
        for w in range(2)
    ]  # fmt: skip
    return {
        "observedGeneration": 1,
        "conditions": [
            condition("Ready", "True", "Running", "4 ranks are training"),
            condition("Placed", "True", "Placed"),
        ],
        "plan": {"tensor": 2, "pipeline": 1, "data": 2, "microBatches": 2, "worldSize": 4, "workers": 2,
                 "summary": "TP 2 x PP 1 x DP 2", "reasons": ["TP 2: set by `parallelism.tensor`"]},
        "placement": {"workers": workers, "tensor": 2, "pipeline": 1, "data": 2, "cost": "0", "gap": "0"},
        "mesh": {"generation": 1},
        "readyRanks": "4/4",
        "step": step,
        "totalSteps": 60,
        "loss": "3.2",
        "etaSeconds": 75,
        "replicas": 2,
        **more,
    }  # fmt: skip


def run_program(*arguments: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run the installed program as a process."""
    return subprocess.run([PROGRAM, *arguments], capture_output=True, text=True, env=environment, check=False)


def parsed(result: Result) -> Any:
    return json.loads(result.stdout)
