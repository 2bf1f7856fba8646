"""The chart's objects for several values files. Rendering needs `helm` on the PATH, or its path in HELM."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.golden.files import check
from tests.tiers import mostly_long

CHART = Path(__file__).parents[3] / "helm" / "meshwright"
HELM = os.environ.get("HELM") or shutil.which("helm")
pytestmark = pytest.mark.skipif(HELM is None, reason="no helm on the PATH and none named by HELM")

PEER = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}
TOLERATION = {"key": "dedicated", "operator": "Equal", "value": "infra", "effect": "NoSchedule"}
AFFINITY = {
    "nodeAffinity": {
        "requiredDuringSchedulingIgnoredDuringExecution": {
            "nodeSelectorTerms": [{"matchExpressions": [{"key": "zone", "operator": "In", "values": ["a", "b"]}]}]
        }
    }
}
VALUES: Mapping[str, dict[str, Any]] = {
    "defaults": {},
    "nothing-optional": {
        "crds": {"enabled": False},
        "userRoles": {"enabled": False},
        "serviceAccount": {"name": "ours"},
        "coordinator": {"tls": {"mode": "secret", "secretName": "ours"}},
        "resources": {},
    },
    "everything": {
        "image": {"repository": "registry.example/mw", "tag": "1.2.3", "pullPolicy": "Always"},
        "imagePullSecrets": [{"name": "pull"}],
        "crds": {"keep": False},
        "watchNamespaces": ["red", "blue"],
        "serviceAccount": {"annotations": {"example.com/role": "operator"}},
        "coordinator": {"port": 7000, "url": "https://mw.example:7443"},
        "metrics": {"port": 7001},
        "operator": {
            "logLevel": "debug", "logFormat": "text", "workers": 3, "leaseSeconds": 30, "resyncSeconds": 600,
            "extraArgs": ["--max-connections-per-source=64"], "extraEnv": [{"name": "TZ", "value": "UTC"}],
            "extraVolumes": [{"name": "ca", "configMap": {"name": "ca"}}],
            "extraVolumeMounts": [{"name": "ca", "mountPath": "/ca"}],
        },
        "admissionPolicy": {"enabled": True},
        "networkPolicy": {"enabled": True, "metricsFrom": [PEER], "jobs": {"enabled": True}},
        "resources": {"requests": {"cpu": "1", "memory": "1Gi"}, "limits": {"cpu": "2", "memory": "2Gi"}},
        "priorityClassName": "system-cluster-critical",
        "nodeSelector": {"node-role": "infra"},
        "tolerations": [TOLERATION],
        "affinity": AFFINITY,
        "podAnnotations": {"prometheus.io/scrape": "true"},
        "podLabels": {"team": "training"},
    },
    "monitoring": {
        "crds": {"enabled": False},
        "monitoring": {
            "enabled": True, "labels": {"release": "kps"}, "grafanaUrl": "https://grafana.example",
            "scrape": {"interval": "30s"}, "rules": {"runbookUrl": "https://docs.example/runbooks"},
            "dashboards": {"namespace": "grafana", "annotations": {"grafana_folder": "Meshwright"}},
        },
    },
    "network-policy": {"networkPolicy": {"enabled": True}, "crds": {"enabled": False}},
    "digest": {"image": {"tag": "1.2.3", "digest": f"sha256:{'a' * 64}"}, "crds": {"enabled": False}},
    "one-namespace": {"watchNamespaces": ["red"], "crds": {"enabled": False}},
    "own-account-and-namespaces": {
        "serviceAccount": {"name": "ours"}, "watchNamespaces": ["red"], "userRoles": {"enabled": False},
        "crds": {"enabled": False},
    },
}  # fmt: skip
RELEASES: Mapping[str, tuple[str, str]] = {"digest": ("meshwright", "meshwright-system")}


def rendered(name: str, values: dict[str, Any], directory: Path) -> dict[str, Any]:
    """The chart's objects by kind, namespace and name."""
    assert HELM is not None
    file = directory / "values.yaml"
    file.write_text(yaml.safe_dump(values))
    release, namespace = RELEASES.get(name, ("mw", "ops"))
    words = [HELM, "template", release, str(CHART), "-n", namespace, "--kube-version", "1.31.0", "-f", str(file)]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = {}
    for item in yaml.load_all(done.stdout, getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
        if item:
            metadata = item["metadata"]
            key = f"{item['kind']} {metadata.get('namespace', '')}/{metadata['name']}"
            assert key not in found
            found[key] = _lasting(item)
    return found


def _lasting(item: dict[str, Any]) -> dict[str, Any]:
    """An object without what other tests compare (the CRD's schema, boards, rules), and without a drawn key."""
    if item["kind"] == "ConfigMap" and "-dashboard-" in item["metadata"]["name"]:
        return {**item, "data": sorted(item["data"])}
    if item["kind"] == "PrometheusRule":
        return {**item, "spec": [group["name"] for group in item["spec"]["groups"]]}
    if item["kind"] == "CustomResourceDefinition":
        return {**item, "spec": {"names": item["spec"]["names"]}}
    if item["kind"] == "Secret":
        return {**item, "data": {key: len(value) for key, value in item["data"].items()}}
    return item


@pytest.mark.parametrize("name", mostly_long(VALUES, lambda name: name in ("nothing-optional", "one-namespace")))
def test_chart(name: str, tmp_path: Path) -> None:
    check(f"chart/{name}.jsonl", rendered(name, VALUES[name], tmp_path))
