"""A real Prometheus that scrapes the operator, the worker pods of the cluster, and a recorded exporter of GPUs.

Debian's package is `prometheus`. It cannot discover pods by itself, so the test answers its HTTP discovery with the
pods of the API server (`discovered`), as the chart's PodMonitor selects them.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import yaml

from meshwright.api.labels import LABEL_JOB
from meshwright.api.objects import KubeObject
from meshwright_cli.child_processes import Program, Programs
from meshwright_cli.demo.setup import free_port, wait_until_ready

PROMETHEUS = shutil.which("prometheus")
SCRAPE_SECONDS = 1
JOB_LABEL = "__meta_kubernetes_pod_label_meshwright_dev_job_name"
JOB_NAME = [{"source_labels": [JOB_LABEL], "target_label": "job_name"}]
WITHOUT_CLAIMED_LABELS = [{"action": "labeldrop", "regex": "exported_(namespace|job_name)"}]
"""What the chart's PodMonitor does with the labels of worker pods."""


@dataclass(frozen=True)
class Series:
    """A series of an answer."""

    labels: Mapping[str, str]
    values: Sequence[tuple[float, float]]
    """Time and value. Empty if every value is NaN."""


@dataclass(frozen=True)
class Prometheus:
    """The running server."""

    url: str
    program: Program

    async def _get(self, path: str, **parameters: str) -> Any:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as session,
            session.get(f"{self.url}/api/v1/{path}", params=parameters) as response,
        ):
            answer = await response.json()
        assert answer["status"] == "success", f"{answer.get('error')}: {parameters}"
        return answer["data"]

    async def query(self, expr: str, at: float) -> list[Series]:
        """The series of an instant query that have a number."""
        found = await self._get("query", query=expr, time=str(at))
        return _series((item["metric"], [item["value"]]) for item in found["result"])

    async def query_range(self, expr: str, start: float, end: float, step: float = SCRAPE_SECONDS) -> list[Series]:
        """The series of a range query that have a number anywhere."""
        found = await self._get("query_range", query=expr, start=str(start), end=str(end), step=str(step))
        return _series((item["metric"], item["values"]) for item in found["result"])

    async def targets(self) -> dict[str, list[str]]:
        """Health of the targets by scrape job."""
        active = (await self._get("targets", state="active"))["activeTargets"]
        found: dict[str, list[str]] = {}
        for target in active:
            found.setdefault(target["labels"]["job"], []).append(target["health"])
        return found

    async def firing(self) -> dict[str, list[Mapping[str, str]]]:
        """Labels of the alerts that fire, by name."""
        found: dict[str, list[Mapping[str, str]]] = {}
        for alert in (await self._get("alerts"))["alerts"]:
            if alert["state"] == "firing":
                found.setdefault(alert["labels"]["alertname"], []).append({**alert["labels"], **alert["annotations"]})
        return found


def _series(items: Any) -> list[Series]:
    numbers = ((metric, [(float(t), float(v)) for t, v in values if v != "NaN"]) for metric, values in items)
    return [Series(metric, values) for metric, values in numbers if values]


def discovered(pods: Sequence[KubeObject]) -> list[dict[str, Any]]:
    """The ports named `metrics` of pods that have an address, for Prometheus's HTTP discovery."""
    found = []
    for pod in pods:
        address, name = pod.get("status", {}).get("podIP"), pod["metadata"]["name"]
        ports = [port for container in pod["spec"]["containers"] for port in container.get("ports", ())]
        numbers = [port["containerPort"] for port in ports if port.get("name") == "metrics"]
        if address and numbers:
            where = {
                "namespace": pod["metadata"]["namespace"],
                "pod": name,
                JOB_LABEL: pod["metadata"]["labels"][LABEL_JOB],
            }
            found.append({"targets": [f"{address}:{number}" for number in numbers], "labels": where})
    return found


def workers(found: Mapping[str, Any]) -> dict[str, Any]:
    """The scrape configuration of worker pods, which `found` discovers, as the chart's PodMonitor makes it."""
    return {
        "job_name": "workers",
        **found,
        "relabel_configs": JOB_NAME,
        "metric_relabel_configs": WITHOUT_CLAIMED_LABELS,
    }


def configuration(operator: str, exporter: str, rules: Path) -> dict[str, Any]:
    """The configuration: what the monitors of the chart, and that of NVIDIA's GPU Operator, become."""
    pods = {"url": f"http://{exporter}/pods", "refresh_interval": f"{SCRAPE_SECONDS}s"}
    own = {"targets": [exporter], "labels": {"namespace": "gpu-operator", "pod": "nvidia-dcgm-exporter-x7k2p"}}
    return {
        "global": {"scrape_interval": f"{SCRAPE_SECONDS}s", "evaluation_interval": f"{SCRAPE_SECONDS}s"},
        "rule_files": [str(rules)],
        "scrape_configs": [
            {"job_name": "operator", "honor_labels": True, "static_configs": [{"targets": [operator]}]},
            workers({"http_sd_configs": [pods]}),
            {"job_name": "dcgm", "static_configs": [own]},
            {"job_name": "dcgm-honored", "honor_labels": True, "static_configs": [own]},
        ],
    }


async def start_prometheus(programs: Programs, directory: Path, document: Mapping[str, Any]) -> Prometheus:
    """Start Prometheus and wait until it answers."""
    assert PROMETHEUS is not None
    file = directory / "prometheus.yaml"
    file.write_text(yaml.safe_dump(dict(document)))
    address = f"127.0.0.1:{free_port()}"
    argv = [PROMETHEUS, f"--config.file={file}", f"--storage.tsdb.path={directory / 'tsdb'}", "--log.level=warn"]
    argv.append(f"--web.listen-address={address}")
    program = await programs.start("prometheus", argv, directory / "prometheus.log")

    async def ready() -> bool:
        try:
            async with aiohttp.ClientSession() as session, session.get(f"http://{address}/-/ready") as response:
                return response.status == 200
        except aiohttp.ClientError:
            return False

    await wait_until_ready(ready, program)
    return Prometheus(f"http://{address}", program)
