"""Serves what only machines with GPUs measure: NVIDIA's DCGM exporter, and the utilization that rank 0 reports.

It also serves the list of pods for Prometheus's HTTP discovery.

The families, labels and comments are those of dcgm-exporter 3; one GPU for each worker pod of the job, by name.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from aiohttp import web

from meshwright.api.objects import KubeObject
from tests.e2e.prometheus import discovered

FAMILIES = (
    ("DCGM_FI_DEV_SM_CLOCK", "gauge", "SM clock frequency (in MHz).", 1980),
    ("DCGM_FI_DEV_GPU_TEMP", "gauge", "GPU temperature (in C).", 56),
    ("DCGM_FI_DEV_POWER_USAGE", "gauge", "Power draw (in W).", 612.4),
    ("DCGM_FI_DEV_XID_ERRORS", "gauge", "Value of the last XID error encountered.", 0),
    ("DCGM_FI_DEV_FB_USED", "gauge", "Framebuffer memory used (in MiB).", 71322),
    ("DCGM_FI_PROF_PIPE_TENSOR_ACTIVE", "gauge", "Ratio of cycles the tensor (HMMA) pipe is active.", 0.483),
    ("DCGM_FI_PROF_NVLINK_TX_BYTES", "gauge", "The rate of data transmitted over NVLink (in bytes per second).", 181e9),
    (
        "DCGM_FI_PROF_PCIE_TX_BYTES",
        "gauge",
        "The rate of data transmitted over the PCIe bus (in bytes per second).",
        9e9,
    ),
)
OF_RANK_0 = {"ptj_mfu": 0.412, "ptj_hfu": 0.455, "ptj_job_mfu": 0.409}
"""On a CPU, whose peak is not known, these have no series."""


def exposition(namespace: str, pods: Sequence[str], job: str) -> str:
    """The page for these pods."""
    lines = []
    for name, kind, text, value in FAMILIES:
        lines += [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]
        for number, pod in enumerate(pods):
            pairs = {
                "gpu": str(number),
                "UUID": f"GPU-00000000-0000-0000-0000-{number:012d}",
                "device": f"nvidia{number}",
                "modelName": "NVIDIA H100 80GB HBM3",
                "Hostname": "gpu-node",
                "container": "worker",
                "namespace": namespace,
                "pod": pod,
            }
            lines.append(f"{name}{{{','.join(f'{k}={v!r}' for k, v in pairs.items())}}} {value}".replace("'", '"'))
    for name, value in OF_RANK_0.items():
        lines += [f"# TYPE {name} gauge", f'{name}{{namespace="{namespace}",job_name="{job}"}} {value}']
    return "\n".join([*lines, ""])


@asynccontextmanager
async def recorded_exporter(namespace: str, pods: Callable[[], Sequence[KubeObject]], job: str) -> AsyncIterator[str]:
    """Serve the page and the list; the address. `pods` says which pods there are now."""

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(text=exposition(namespace, [pod["metadata"]["name"] for pod in pods()], job))

    async def targets(_: web.Request) -> web.Response:
        return web.json_response(discovered(pods()))

    application = web.Application()
    application.router.add_get("/pods", targets)
    application.router.add_get("/metrics", metrics)
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        yield f"{host}:{port}"
    finally:
        await runner.cleanup()
