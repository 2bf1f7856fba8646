"""etcd and a real kube-apiserver, alone, as a process: `python -m tests.operator.real_server DIR`.

Neither scheduler nor controllers: the tests' own kubelet binds and ends pods, as on the embedded API server. Kubernetes
1.36 serves its own PodGroups, which are off by default there.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

from meshwright_local.kube.kubeconfig import write_kubeconfig
from meshwright_local.providers import envtest
from meshwright_local.providers.envtest import EnvtestProvider, find_binary
from tests.patience import patient

POD_GROUPS = "--feature-gates=GenericWorkload=true --runtime-config=scheduling.k8s.io/v1alpha2=true"


def with_pod_groups(directory: Path) -> None:
    """Have kube-apiserver 1.36 started with its own PodGroups. Other versions do not have this version of the API."""
    binary = find_binary("kube-apiserver", os.environ)
    if binary is None:
        return
    shown = subprocess.run([binary, "--version"], capture_output=True, text=True, check=True).stdout
    if re.search(r"v1\.36\.", shown):
        wrapper = directory / "kube-apiserver"
        wrapper.write_text(f'#!/bin/sh\nexec "{binary}" "$@" {POD_GROUPS}\n')
        wrapper.chmod(0o755)
        os.environ["TEST_ASSET_KUBE_APISERVER"] = str(wrapper)


async def serve(directory: Path) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    provider = EnvtestProvider(directory)
    try:
        control_plane = await provider.start()
        write_kubeconfig(directory / "kubeconfig", control_plane.connection)
        (directory / "ready").write_text(f"{control_plane.connection.url} {control_plane.connection.token}")
        await stop.wait()
    finally:
        await provider.stop()


if __name__ == "__main__":
    for name in ("KUBE_SCHEDULER", "KUBE_CONTROLLER_MANAGER"):
        os.environ[f"TEST_ASSET_{name}"] = os.devnull
    with_pod_groups(Path(sys.argv[1]))
    envtest._READY_SECONDS = patient(60)
    asyncio.run(serve(Path(sys.argv[1])))
