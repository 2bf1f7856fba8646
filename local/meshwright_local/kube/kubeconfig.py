"""How to reach an API server: address, credentials, trust; read from and written to kubeconfig files."""

from __future__ import annotations

import base64
import os
import ssl
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml


class KubeconfigError(Exception):
    """A kubeconfig file cannot be used; the message names the file and the field."""


@dataclass(frozen=True, slots=True)
class Connection:
    """Address and credentials of an API server. `repr` shows no secret."""

    url: str
    token: str | None = None
    ca_pem: str | None = None
    """Certificates to trust; None: those of the system."""
    client_pem: str | None = None
    """Client certificate and private key, concatenated; None if there is none."""
    verify: bool = True

    def __repr__(self) -> str:
        return f"Connection({self.url!r})"

    def ssl_context(self) -> ssl.SSLContext | None:
        """Return the TLS settings, or None for plain HTTP."""
        if not self.url.startswith("https://"):
            return None
        context = ssl.create_default_context(cadata=self.ca_pem)
        # Python 3.13 requires extensions that the certificates of many clusters lack.
        context.verify_flags &= ~ssl.VERIFY_X509_STRICT
        if not self.verify:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        if self.client_pem:
            # The ssl module reads key pairs only from files. This file is private and deleted at once.
            with tempfile.NamedTemporaryFile("w", suffix=".pem") as file:
                file.write(self.client_pem)
                file.flush()
                context.load_cert_chain(file.name)
        return context

    @classmethod
    def from_kubeconfig(cls, path: Path, context: str | None = None) -> Connection:
        """Read one context (default: the current one) of a kubeconfig file.

        Raises:
            KubeconfigError: The file or context does not exist, or a plugin provides the credentials.
        """
        try:
            config = yaml.safe_load(path.read_text())
        except (OSError, yaml.YAMLError) as error:
            raise KubeconfigError(f"{path}: cannot be read: {error}") from error
        if not isinstance(config, dict):
            raise KubeconfigError(f"{path}: is not a kubeconfig file")
        chosen = _entry(config, path, "contexts", "context", context or config.get("current-context") or "")
        cluster = _entry(config, path, "clusters", "cluster", chosen.get("cluster", ""))
        user = _entry(config, path, "users", "user", chosen["user"]) if chosen.get("user") else {}
        if "exec" in user or "auth-provider" in user:
            raise KubeconfigError(f"{path}: users[].user.exec is not supported here: use a token or a certificate")
        token = user.get("token")
        if token is None and user.get("tokenFile"):
            token = (path.parent / user["tokenFile"]).read_text().strip()
        certificate, key = _pem(user, "client-certificate", path), _pem(user, "client-key", path)
        return cls(
            url=str(cluster["server"]).rstrip("/"),
            token=token,
            ca_pem=_pem(cluster, "certificate-authority", path),
            client_pem=f"{certificate}\n{key}" if certificate and key else None,
            verify=not cluster.get("insecure-skip-tls-verify", False),
        )


def _entry(config: dict[str, Any], path: Path, section: str, field: str, name: str) -> dict[str, Any]:
    for entry in config.get(section) or ():
        if entry.get("name") == name:
            return dict(entry.get(field) or {})
    raise KubeconfigError(f"{path}: {section} has no entry named {name!r}")


def _pem(section: dict[str, Any], field: str, path: Path) -> str | None:
    if data := section.get(f"{field}-data"):
        return base64.b64decode(str(data)).decode()
    file = section.get(field)
    return (path.parent / str(file)).read_text() if file else None


def write_kubeconfig(path: Path, connection: Connection) -> None:
    """Write a kubeconfig file with one context, readable only by its owner. Replaces an existing file atomically."""
    cluster: dict[str, object] = {"server": connection.url}
    if connection.ca_pem:
        cluster["certificate-authority-data"] = base64.b64encode(connection.ca_pem.encode()).decode()
    elif not connection.verify:
        cluster["insecure-skip-tls-verify"] = True
    user: dict[str, object] = {"token": connection.token} if connection.token else {}
    if connection.client_pem:
        encoded = base64.b64encode(connection.client_pem.encode()).decode()
        user |= {"client-certificate-data": encoded, "client-key-data": encoded}
    name = "meshwright-local"
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": name,
        "clusters": [{"name": name, "cluster": cluster}],
        "users": [{"name": name, "user": user}],
        "contexts": [{"name": name, "context": {"cluster": name, "user": name, "namespace": "default"}}],
    }
    write_private(path, yaml.safe_dump(config, sort_keys=False))


def write_private(path: Path, text: str) -> None:
    """Write a file atomically, readable only by its owner. Create its directory if needed."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.unlink(missing_ok=True)
    with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)
    temporary.replace(path)
