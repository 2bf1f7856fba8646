"""Kueue's own controller next to a real API server: CRDs, webhooks and scheduler, given a build.

`KUEUE` is the path of Kueue's binary, and `KUEUE_CONFIG` that of the directory `config/components` of the same release.
Without them, the tests that need Kueue are skipped, as those of the chart without `HELM`.
"""

from __future__ import annotations

import asyncio
import base64
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import yaml
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.x509.oid import NameOID

from meshwright.api.objects import KubeObject
from meshwright_local.nodeagent.network.ports import free_port
from tests.operator.support import Api, until, write_kubeconfig

GROUP = "/apis/kueue.x-k8s.io/v1beta2"
WORKLOADS = f"{GROUP}/namespaces/default/workloads"
CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
WEBHOOKS = "/apis/admissionregistration.k8s.io/v1"
SYSTEM = "kueue-system"
KIND = "ParallelTrainingJob.v1alpha1.meshwright.dev"
SERVICE = f"kueue-webhook-service.{SYSTEM}.svc"


def given() -> tuple[Path, Path] | None:
    """The binary and the configuration of Kueue, if both were given."""
    binary, config = os.environ.get("KUEUE"), os.environ.get("KUEUE_CONFIG")
    return (Path(binary), Path(config)) if binary and config else None


@asynccontextmanager
async def kueue(api: Api, directory: Path, binary: Path, config: Path) -> AsyncIterator[None]:
    """Kueue, installed and ready to admit."""
    port, health = free_port(), free_port()
    certificates = _certificates()
    for name, content in certificates.items():
        (directory / name).write_bytes(content)
    await _install(api, config, port, certificates)
    configuration = directory / "configuration.yaml"
    configuration.write_text(yaml.safe_dump(_configuration(directory, port, health)))
    kubeconfig = write_kubeconfig(directory / "kubeconfig", api.url, api.token)
    gates = "VisibilityOnDemand=false"
    command = [str(binary), f"--config={configuration}", f"--kubeconfig={kubeconfig}", f"--feature-gates={gates}"]
    environment = {**os.environ, "GOMAXPROCS": "1"}
    with (directory / "log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(*command, stderr=log, env=environment)
    try:
        await _ready(api, process)
        yield
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


async def _ready(api: Api, process: asyncio.subprocess.Process) -> None:
    """Waits until webhooks answer and a queue is active."""

    async def active() -> bool:
        assert process.returncode is None, "Kueue has ended: see its log"
        await api.call("POST", f"{GROUP}/resourceflavors", flavor("probe"), ok=False)
        await api.call("POST", f"{GROUP}/clusterqueues", cluster_queue("probe", {"probe": 1}), ok=False)
        found = await api.call("GET", f"{GROUP}/clusterqueues/probe", ok=False)
        conditions = (found.get("status") or {}).get("conditions") or () if found["kind"] != "Status" else ()
        return any((one["type"], one["status"]) == ("Active", "True") for one in conditions)

    await until(active, "Kueue is ready", 120)


async def _install(api: Api, config: Path, port: int, certificates: dict[str, bytes]) -> None:
    ca = base64.b64encode(certificates["ca.crt"]).decode()
    converted = _converted(config / "crd")
    for path in sorted((config / "crd" / "bases").glob("*.yaml")):
        definition = yaml.safe_load(path.read_text())
        name = definition["metadata"]["name"]
        client = {"url": f"https://127.0.0.1:{port}/convert", "caBundle": ca}
        webhook = {"clientConfig": client, "conversionReviewVersions": ["v1"]}
        conversion = {"strategy": "Webhook", "webhook": webhook} if name in converted else {"strategy": "None"}
        definition["spec"]["conversion"] = conversion
        await api.call("POST", CRDS, definition, ok=False)
        await api.patch(f"{CRDS}/{name}", {"spec": {"conversion": conversion}})
    await api.call("POST", "/api/v1/namespaces", {"metadata": {"name": SYSTEM}}, ok=False)
    data = {name: base64.b64encode(content).decode() for name, content in certificates.items()}
    secret = {"metadata": {"name": "kueue-webhook-server-cert"}, "data": data}
    await api.delete(f"/api/v1/namespaces/{SYSTEM}/secrets/kueue-webhook-server-cert")
    await api.create(f"/api/v1/namespaces/{SYSTEM}/secrets", secret)
    for path, body in _webhooks(config, port, ca):
        await api.create(path, body)

    async def served() -> bool:
        found = [one for one in await api.items(CRDS) if one["spec"]["group"] == "kueue.x-k8s.io"]
        conditions = [one for crd in found for one in (crd.get("status") or {}).get("conditions") or ()]
        return sum((one["type"], one["status"]) == ("Established", "True") for one in conditions) == len(found)

    await until(served, "the CRDs of Kueue are served", 60)


def _converted(directory: Path) -> set[str]:
    """The CRDs that Kueue converts between versions: those with such a patch in the kustomization of this directory."""
    patches = yaml.safe_load((directory / "kustomization.yaml").read_text())["patches"]
    bodies = [yaml.safe_load((directory / patch["path"]).read_text()) for patch in patches]
    return {body["metadata"]["name"] for body in bodies if "conversion" in body["spec"]}


def _webhooks(config: Path, port: int, ca: str) -> Iterator[tuple[str, KubeObject]]:
    """Kueue's webhooks for its own kinds, at the address of the process."""
    for body in yaml.safe_load_all((config / "webhook" / "manifests.yaml").read_text()):
        hooks = [one for one in body["webhooks"] if one["rules"][0]["apiGroups"] == ["kueue.x-k8s.io"]]
        for hook in hooks:
            path = hook["clientConfig"]["service"]["path"]
            hook["clientConfig"] = {"url": f"https://127.0.0.1:{port}{path}", "caBundle": ca}
        kind = body["kind"].lower() + "s"
        body = {**body, "metadata": {"name": f"kueue-{body['metadata']['name']}"}, "webhooks": hooks}
        yield f"{WEBHOOKS}/{kind}", body


async def uninstall(api: Api) -> None:
    """Removes what makes an API server without Kueue refuse objects."""
    for kind in ("mutatingwebhookconfigurations", "validatingwebhookconfigurations"):
        for found in await api.items(f"{WEBHOOKS}/{kind}"):
            if found["metadata"]["name"].startswith("kueue-"):
                await api.delete(f"{WEBHOOKS}/{kind}/{found['metadata']['name']}")


def _configuration(directory: Path, port: int, health: int) -> KubeObject:
    return {
        "apiVersion": "config.kueue.x-k8s.io/v1beta2",
        "kind": "Configuration",
        "namespace": SYSTEM,
        "health": {"healthProbeBindAddress": f"127.0.0.1:{health}"},
        "metrics": {"bindAddress": "0"},
        "webhook": {"host": "127.0.0.1", "port": port, "certDir": str(directory)},
        "leaderElection": {"leaderElect": False},
        "internalCertManagement": {
            "enable": True,
            "webhookServiceName": "kueue-webhook-service",
            "webhookSecretName": "kueue-webhook-server-cert",
        },
        "integrations": {
            "frameworks": ["batch/job"],
            "externalFrameworks": [KIND],
        },
        "multiKueue": {"externalFrameworks": [{"name": KIND}]},
    }


def _certificates() -> dict[str, bytes]:
    """A CA, and a certificate for the webhooks at 127.0.0.1, in the form that Kueue keeps in its Secret."""
    now = datetime.now(UTC)
    authority, key = (rsa.generate_private_key(65537, 2048) for _ in range(2))
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "kueue-ca")])
    usage = x509.KeyUsage(True, False, False, False, False, True, True, False, False)

    def builder(subject: x509.Name, public: rsa.RSAPublicKey) -> x509.CertificateBuilder:
        built = x509.CertificateBuilder().subject_name(subject).issuer_name(name).public_key(public)
        built = built.serial_number(x509.random_serial_number())
        return built.not_valid_before(now - timedelta(hours=1)).not_valid_after(now + timedelta(days=3650))

    ca = builder(name, authority.public_key()).add_extension(x509.BasicConstraints(True, None), True)
    # Kueue looks for the CA's name here, and makes another CA if it is not there.
    ca = ca.add_extension(usage, True).add_extension(x509.SubjectAlternativeName([x509.DNSName("kueue-ca")]), False)
    server = builder(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, SERVICE)]), key.public_key())
    names = x509.SubjectAlternativeName([x509.DNSName(SERVICE), x509.IPAddress(ip_address("127.0.0.1"))])
    server = server.add_extension(names, False)
    server = server.add_extension(x509.ExtendedKeyUsage([x509.ExtendedKeyUsageOID.SERVER_AUTH]), False)
    signed = [one.sign(authority, hashes.SHA256()) for one in (ca, server)]
    return {
        "ca.crt": signed[0].public_bytes(serialization.Encoding.PEM),
        "ca.key": _pem(authority),
        "tls.crt": signed[1].public_bytes(serialization.Encoding.PEM),
        "tls.key": _pem(key),
    }


def _pem(key: rsa.RSAPrivateKey) -> bytes:
    plain = serialization.NoEncryption()
    return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.TraditionalOpenSSL, plain)


# Objects of Kueue.


def flavor(name: str, topology: str = "", **labels: str) -> KubeObject:
    """A resource flavor of the nodes with these labels."""
    spec: dict[str, Any] = {"nodeLabels": labels} if labels else {}
    spec |= {"topologyName": topology} if topology else {}
    return {"apiVersion": "kueue.x-k8s.io/v1beta2", "kind": "ResourceFlavor", "metadata": {"name": name}, "spec": spec}


def topology(name: str, *levels: str) -> KubeObject:
    """The levels of the cluster, the widest first."""
    spec = {"levels": [{"nodeLabel": level} for level in levels]}
    return {"apiVersion": "kueue.x-k8s.io/v1beta2", "kind": "Topology", "metadata": {"name": name}, "spec": spec}


def cluster_queue(name: str, gpus: dict[str, int], **spec: Any) -> KubeObject:
    """A queue with so many GPUs of each flavor."""
    flavors = [
        {"name": one, "resources": [{"name": "nvidia.com/gpu", "nominalQuota": str(quota)}]}
        for one, quota in gpus.items()
    ]
    groups = [{"coveredResources": ["nvidia.com/gpu"], "flavors": flavors}]
    return {
        "apiVersion": "kueue.x-k8s.io/v1beta2",
        "kind": "ClusterQueue",
        "metadata": {"name": name},
        "spec": {"namespaceSelector": {}, "resourceGroups": groups, **spec},
    }


def local_queue(name: str, cluster: str) -> KubeObject:
    """The queue of a namespace."""
    return {
        "apiVersion": "kueue.x-k8s.io/v1beta2",
        "kind": "LocalQueue",
        "metadata": {"name": name},
        "spec": {"clusterQueue": cluster},
    }
