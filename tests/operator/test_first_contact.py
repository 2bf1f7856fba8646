"""What the operator says when it cannot start: one clear line, and no traceback."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from meshwright_operator.controller.http_server import serve_application
from meshwright_operator.http.server import ListenError
from meshwright_operator.kube.client import ApiError
from meshwright_operator.kube.first_contact import ClusterError, wait_for_cluster
from meshwright_operator.settings import Address
from tests.patience import patient
from tests.tiers import mostly_long

LISTEN = ("--coordinator-listen", "127.0.0.1:19471")
KUBECONFIG = """
apiVersion: v1
kind: Config
current-context: c
contexts: [{name: c, context: {cluster: c, user: u}}]
clusters: [{name: c, cluster: {server: "http://127.0.0.1:1"}}]
users: [{name: u, user: {token: t}}]
"""


def operator(kubeconfig: Path, *arguments: str) -> tuple[int, list[str]]:
    """Exit code and lines of an operator that cannot start."""
    environment = {**os.environ, "KUBECONFIG": str(kubeconfig)}
    environment.pop("KUBERNETES_SERVICE_HOST", None)
    command = [sys.executable, "-m", "meshwright_operator", "--log-format=text", *LISTEN, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=patient(60), check=False)
    return done.returncode, (done.stdout + done.stderr).splitlines()


@pytest.mark.parametrize(
    ("text", "says"),
    mostly_long(
        [
            ("{ not yaml: [", "is not a valid kubeconfig file"),
            ("clusters: 5", "is not a valid kubeconfig file"),
            ("- 1", "is not a valid kubeconfig file"),
            ("{}", "current-context"),
        ],
        lambda case: case[0] in ("clusters: 5", "{}"),
    ),
)
def test_a_malformed_kubeconfig_is_one_line(tmp_path: Path, text: str, says: str) -> None:
    file = tmp_path / "config"
    file.write_text(text)
    code, lines = operator(file)
    errors = [line for line in lines if " error " in line]
    assert code == 2
    assert len(errors) == 1
    assert says in errors[0]
    assert "set --kubeconfig" in errors[0]
    assert not any("Traceback" in line for line in lines)


def test_a_port_in_use_is_one_line_that_names_the_flag(tmp_path: Path) -> None:
    file = tmp_path / "config"
    file.write_text(KUBECONFIG)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, lines = operator(file, "--metrics-listen", f"127.0.0.1:{port}")
    assert code == 1
    assert len(lines) == 1, lines
    assert f"cannot listen on 127.0.0.1:{port} (--metrics-listen): address already in use" in lines[0]
    assert "set --metrics-listen to another address" in lines[0]


async def test_the_coordinators_port_is_named_by_its_flag() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = Address("127.0.0.1", taken.getsockname()[1])
        with pytest.raises(ListenError, match="--coordinator-listen"):
            async with serve_application(aiohttp.web.Application(), address, flag="--coordinator-listen"):
                pass


class Server:
    """Answers with an error as often as told."""

    def __init__(self, *errors: ApiError) -> None:
        self.errors = list(errors)
        self.calls = 0

    async def get(self, path: str) -> dict[str, Any]:
        self.calls += 1
        if self.errors:
            raise self.errors.pop(0) if len(self.errors) > 1 else self.errors[0]
        return {}


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (ApiError(0, "ClientConnectorError", "connection refused"), "the API server at http://x cannot be reached"),
        (ApiError(404, "NotFound", "not found"), "meshwright crd | kubectl apply --server-side -f -"),
    ],
)
async def test_a_cluster_that_is_not_there_and_one_without_the_crd_are_named(error: ApiError, says: str) -> None:
    server = Server(error)
    with pytest.raises(ClusterError) as caught:
        await wait_for_cluster(server, "http://x", lambda: None, patience=0.0)  # type: ignore[arg-type]
    assert says in str(caught.value)


@pytest.mark.parametrize("code", [403, 429, 500, 503])
async def test_a_server_with_other_trouble_is_there(code: int) -> None:
    await wait_for_cluster(Server(ApiError(code, "X", "x")), "http://x", lambda: None, patience=0.0)  # type: ignore[arg-type]


async def test_a_cluster_that_starts_late_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshwright_operator.kube.first_contact.RETRY_SECONDS", 0.0)
    refused = ApiError(0, "ClientConnectorError", "refused")
    server, alive = Server(refused, refused, ApiError(404, "NotFound", "no CRD"), ApiError(403, "F", "f")), []
    await wait_for_cluster(server, "http://x", lambda: alive.append(1))  # type: ignore[arg-type]
    assert (server.calls, len(alive)) == (4, 3)
