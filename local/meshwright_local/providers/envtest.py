"""Real control-plane binaries, located as envtest does.

`TEST_ASSET_ETCD`, `TEST_ASSET_KUBE_APISERVER` and so on name one binary each, `KUBEBUILDER_ASSETS` a directory of them.
etcd (3.5.30 or newer for current releases) and kube-apiserver are required. kube-scheduler and kube-controller-manager
are used if they exist; otherwise the embedded ones run. Nodes are always simulated.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import math
import os
import secrets
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path

from meshwright_local.apiserver.auth.certificates import TlsFiles
from meshwright_local.controllers.node_lifecycle import NodeTimes
from meshwright_local.kube.client import ApiClient
from meshwright_local.kube.kubeconfig import Connection, write_kubeconfig
from meshwright_local.nodeagent.network.ports import free_port
from meshwright_local.nodeagent.server.kubelet_server import KubeletTls
from meshwright_local.providers.base import ControlPlane, ProviderError, serving_files

_DEFAULT_DIRECTORY = "/usr/local/kubebuilder/bin"
_READY_SECONDS = 60.0
_STOP_SECONDS = 10.0
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)


def find_binary(name: str, environment: Mapping[str, str]) -> Path | None:
    """Return the path of a binary, from its own variable or else the common directory; None if there is none."""
    own = environment.get("TEST_ASSET_" + name.upper().replace("-", "_"))
    path = Path(own) if own else Path(environment.get("KUBEBUILDER_ASSETS") or _DEFAULT_DIRECTORY) / name
    return path if path.is_file() and os.access(path, os.X_OK) else None


class EnvtestProvider:
    """Runs etcd and kube-apiserver on free ports of 127.0.0.1. They end with this process, however it ends."""

    def __init__(self, directory: Path, times: NodeTimes | None = None) -> None:
        self._directory = directory
        self._times = times or NodeTimes()
        self._logs = directory / "control-plane"
        self._processes: list[tuple[str, asyncio.subprocess.Process]] = []

    async def start(self) -> ControlPlane:
        """Start the available binaries and wait for the API server."""
        binaries = {name: find_binary(name, os.environ) for name in ("etcd", "kube-apiserver")}
        for name, path in binaries.items():
            if path is None:
                raise ProviderError(f"{name} not found: set KUBEBUILDER_ASSETS to a directory that has it")
        self._logs.mkdir(parents=True, exist_ok=True)
        tls = serving_files(self._directory / "certificates", client=True)
        kubelet = KubeletTls(tls.certificate, tls.key, secrets.token_urlsafe(32), client_ca=tls.authority)
        token = secrets.token_urlsafe(32)
        etcd, port = await self._start_etcd(), free_port()
        await self._start("kube-apiserver", self._apiserver_flags(etcd, port, token, tls))
        connection = Connection(f"https://127.0.0.1:{port}", token, tls.authority.read_text())
        await self._wait_ready(connection)
        kubeconfig = self._logs / "kubeconfig"
        write_kubeconfig(kubeconfig, connection)
        return ControlPlane(
            connection,
            kubelet,
            has_scheduler=await self._start_optional("kube-scheduler", kubeconfig),
            has_controllers=await self._start_optional(
                "kube-controller-manager",
                kubeconfig,
                f"--service-account-private-key-file={tls.key}",
                f"--node-monitor-grace-period={self._times.heartbeat}s",
                f"--node-monitor-period={self._times.check}s",
            ),
        )

    async def stop(self) -> None:
        """Stop all processes, etcd last: without etcd, kube-apiserver does not exit on SIGTERM."""
        for _, process in reversed(self._processes):
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            try:
                async with asyncio.timeout(_STOP_SECONDS):
                    await process.wait()
            except TimeoutError:
                process.kill()
                await process.wait()
        self._processes.clear()

    async def _start(self, name: str, flags: list[str]) -> None:
        environment = {"PATH": os.environ.get("PATH", ""), "HOME": str(self._logs)}
        with (self._logs / f"{name}.log").open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                str(find_binary(name, os.environ)), *flags, env=environment, cwd=self._logs,
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, preexec_fn=_die_with_parent,
            )  # fmt: skip
        self._processes.append((name, process))

    async def _start_optional(self, name: str, kubeconfig: Path, *flags: str) -> bool:
        if find_binary(name, os.environ) is None:
            return False
        # On the address where the port is free, not on all.
        serving = ["--bind-address=127.0.0.1", f"--secure-port={free_port()}"]
        await self._start(name, [f"--kubeconfig={kubeconfig}", "--leader-elect=false", *serving, *flags])
        return True

    async def _start_etcd(self) -> str:
        client, peer = (f"http://127.0.0.1:{free_port()}" for _ in range(2))
        await self._start(
            "etcd",
            [
                f"--data-dir={self._logs / 'etcd'}",
                f"--listen-client-urls={client}",
                f"--advertise-client-urls={client}",
                f"--listen-peer-urls={peer}",
                f"--initial-advertise-peer-urls={peer}",
                f"--initial-cluster=default={peer}",
            ],
        )
        return client

    def _apiserver_flags(self, etcd: str, port: int, token: str, tls: TlsFiles) -> list[str]:
        tokens = self._logs / "tokens.csv"
        tokens.touch(mode=0o600)
        tokens.write_text(f'{token},admin,admin,"system:masters"\n')
        return [
            f"--etcd-servers={etcd}",
            "--bind-address=127.0.0.1",
            "--advertise-address=127.0.0.1",
            f"--secure-port={port}",
            f"--cert-dir={self._logs}",
            f"--tls-cert-file={tls.certificate}",
            f"--tls-private-key-file={tls.key}",
            f"--token-auth-file={tokens}",
            "--authorization-mode=RBAC",
            "--allow-privileged=true",  # as clusters with GPUs, whose device plugins need it
            # Pods get no service account tokens here, because nothing mounts them.
            "--disable-admission-plugins=ServiceAccount",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={tls.certificate}",
            f"--service-account-signing-key-file={tls.key}",
            "--service-cluster-ip-range=10.0.0.0/24",
            "--endpoint-reconciler-type=none",
            f"--default-not-ready-toleration-seconds={math.ceil(self._times.tolerate)}",
            f"--default-unreachable-toleration-seconds={math.ceil(self._times.tolerate)}",
            # For `kubectl logs`: its client certificate, and the authority it trusts for certificates of nodes.
            f"--kubelet-client-certificate={tls.certificate}",
            f"--kubelet-client-key={tls.key}",
            f"--kubelet-certificate-authority={tls.authority}",
            "--kubelet-preferred-address-types=InternalIP",
        ]

    async def _wait_ready(self, connection: Connection) -> None:
        async with ApiClient(connection, timeout=2) as client:
            waiting = asyncio.create_task(client.wait_ready(_READY_SECONDS))
            endings = [asyncio.create_task(process.wait()) for _, process in self._processes]
            try:
                await asyncio.wait([waiting, *endings], return_when=asyncio.FIRST_COMPLETED)
                for (name, _), ending in zip(self._processes, endings, strict=True):
                    if ending.done():
                        raise ProviderError(f"{name} ended with {ending.result()}: see {self._logs / name}.log")
                await waiting
            except TimeoutError as error:
                raise ProviderError(f"kube-apiserver is not ready yet: see {self._logs}/kube-apiserver.log") from error
            finally:
                for task in (waiting, *endings):
                    task.cancel()


def _die_with_parent() -> None:
    # No process of the control plane may outlive this process, not even after SIGKILL.
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
