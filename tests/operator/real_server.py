"""etcd and a real kube-apiserver, alone, as a process: `python -m tests.operator.real_server DIR`.

Neither scheduler nor controllers: the tests' own kubelet binds and ends pods, as on the embedded API server.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

from meshwright_local.kube.kubeconfig import write_kubeconfig
from meshwright_local.providers.envtest import EnvtestProvider


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
    asyncio.run(serve(Path(sys.argv[1])))
