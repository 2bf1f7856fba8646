"""The kubeconfig of a server: what kubectl, kopf and client libraries need to reach it as its administrator."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import yaml

from meshwright.local.apiserver.certificates import write_private
from meshwright.local.apiserver.server import ApiServer

NAME = "meshwright-local"


def content(url: str, token: str, authority_pem: str) -> dict[str, Any]:
    """A kubeconfig with one cluster, one user and one context."""
    authority = base64.b64encode(authority_pem.encode()).decode()
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": NAME, "cluster": {"server": url, "certificate-authority-data": authority}}],
        "users": [{"name": NAME, "user": {"token": token}}],
        "contexts": [{"name": NAME, "context": {"cluster": NAME, "user": NAME, "namespace": "default"}}],
        "current-context": NAME,
    }


def write(path: Path, server: ApiServer) -> None:
    """Write a server's kubeconfig. Only its owner can read it, since its token may do everything."""
    write_private(path, yaml.safe_dump(content(server.url, server.token, server.ca_pem), sort_keys=False))
