"""The chart over a matrix of values: every object is valid for the oldest and the newest supported Kubernetes.

Needs `helm` on the PATH, or its path in HELM, and for the schemas `pip install kubernetes-validate`, which contains
those of Kubernetes 1.25 and newer. `--cluster assets` also asks a real kube-apiserver, with a dry run of each object.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from meshwright_local.kube.client import ApiClient, ApiError
from meshwright_local.providers.envtest import EnvtestProvider
from tests.golden.chart.test_chart import VALUES
from tests.tiers import mostly_long

ROOT = Path(__file__).parents[2]
CHART = ROOT / "helm" / "meshwright"
HELM = os.environ.get("HELM") or shutil.which("helm")
OLDEST, NEWEST = "1.30.0", "1.37.0"
OTHERS = {"ServiceMonitor", "PodMonitor", "PrometheusRule", "Certificate"}
"""Kinds of the Prometheus Operator and cert-manager."""
pytestmark = pytest.mark.skipif(HELM is None, reason="no helm on the PATH and none named by HELM")

JOBS = {"enabled": True, "egress": [{"to": [{"ipBlock": {"cidr": "10.20.0.0/16"}}]}]}
# One value of each choice is combined with every value of each other one.
CHOICES: dict[str, list[dict[str, Any]]] = {
    "tls": [
        {},
        {"coordinator": {"tls": {"mode": "secret", "secretName": "ours", "serverName": "mw.example"}}},
        {"coordinator": {"tls": {"mode": "certManager", "issuer": {"name": "ca", "kind": "ClusterIssuer"}}}},
        {"coordinator": {"tls": {"mode": "disabled"}}},
    ],
    "replicas": [{}, {"replicas": 1}, {"replicas": 3}],
    "namespaces": [{}, {"watchNamespaces": ["red", "blue"]}],
    "account": [{}, {"serviceAccount": {"name": "ours"}}],
    "policies": [{}, {"admissionPolicy": {"enabled": True}, "networkPolicy": {"enabled": True, "jobs": JOBS}}],
    "monitoring": [{}, {"monitoring": {"enabled": True, "labels": {"release": "kps"}}}],
    "crds": [{}, {"crds": {"enabled": False}}, {"crds": {"keep": False}}],
    "roles": [{}, {"userRoles": {"enabled": False}}],
}


def pairs() -> list[dict[str, Any]]:
    """Values in which every two choices meet in all their values; greedy, and the same each time."""
    wanted = {
        frozenset(((a, i), (b, j)))
        for a, b in itertools.combinations(CHOICES, 2)
        for i, j in itertools.product(range(len(CHOICES[a])), range(len(CHOICES[b])))
    }
    rows = itertools.product(*(range(len(values)) for values in CHOICES.values()))
    every = [dict(zip(CHOICES, row, strict=True)) for row in rows]
    found = []
    while wanted:

        def new(row: dict[str, int]) -> set[frozenset[tuple[str, int]]]:
            return {frozenset(pair) for pair in itertools.combinations(row.items(), 2)} & wanted  # noqa: B023

        best = max(every, key=lambda row: len(new(row)))
        wanted -= new(best)
        found.append({key: value for name, i in best.items() for key, value in CHOICES[name][i].items()})
    return found


CASES = {**VALUES, **{f"pair-{number}": values for number, values in enumerate(pairs())}}


def render(values: dict[str, Any], directory: Path, version: str) -> str:
    """What `helm template` prints, as Argo CD and Flux's `helm template` call it: without a cluster."""
    file = directory / "values.yaml"
    file.write_text(yaml.safe_dump(values))
    words = [str(HELM), "template", "mw", str(CHART), "-n", "ops", "--kube-version", version, "-f", str(file)]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 0, done.stderr
    return done.stdout


def objects(text: str) -> Iterator[dict[str, Any]]:
    return (item for item in yaml.load_all(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader)) if item)


@pytest.mark.parametrize("case", mostly_long(CASES, lambda case: case in ("everything", "pair-0")))
def test_every_object_fits_the_schemas_and_each_rendering_is_the_same(case: str, tmp_path: Path) -> None:
    schemas = pytest.importorskip("kubernetes_validate")
    for version in (OLDEST, NEWEST):
        text = render(CASES[case], tmp_path, version)
        assert text == render(CASES[case], tmp_path, version)
        seen = set()
        for item in objects(text):
            where = (item["kind"], item["metadata"].get("namespace"), item["metadata"]["name"])
            assert where not in seen, "two objects of one name"
            seen.add(where)
            if item["kind"] not in OTHERS:
                schemas.validate(item, version, strict=True)
        assert {kind for kind, *_ in seen} >= {"Deployment", "Service", "ClusterRole", "ConfigMap"}


def test_the_oldest_version_is_the_one_that_the_chart_states() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["kubeVersion"] == f">={OLDEST}-0"


@pytest.mark.slow
async def test_a_real_server_accepts_every_object(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    if request.config.getoption("--cluster") != "assets":
        pytest.skip("needs a real kube-apiserver: --cluster assets")
    provider = EnvtestProvider(tmp_path)
    try:
        control_plane = await provider.start()
        async with ApiClient(control_plane.connection) as client:
            await client.wait_ready()
            for namespace in ("ops", "red", "blue", "grafana"):
                await client.request("POST", "/api/v1/namespaces", body=_namespace(namespace))
            texts = {case: await asyncio.to_thread(render, values, tmp_path, NEWEST) for case, values in CASES.items()}
            problems = [
                f"{case}: {item['kind']} {item['metadata']['name']}: {error}"
                for case, text in texts.items()
                for item in objects(text)
                if item["kind"] not in OTHERS and (error := await _refusal(client, item))
            ]
            assert problems == []
    finally:
        await provider.stop()


def _namespace(name: str) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}


async def _refusal(client: ApiClient, item: dict[str, Any]) -> str:
    """Why the server does not accept an object; empty if it does."""
    group, _, version = item["apiVersion"].rpartition("/")
    root = f"/apis/{group}/{version}" if group else f"/api/{version}"
    namespace = item["metadata"].get("namespace")
    resources = await client.request("GET", root)
    (plural,) = (r["name"] for r in resources["resources"] if r["kind"] == item["kind"] and "/" not in r["name"])
    path = f"{root}/namespaces/{namespace}/{plural}" if namespace else f"{root}/{plural}"
    try:
        await client.request("POST", f"{path}?dryRun=All&fieldValidation=Strict", body=item)
    except ApiError as error:
        return str(error)
    return ""
