"""Finds the cluster and the credentials: kubeconfig files, one of their contexts, or the service account of a pod.

The rules are those of kubectl. `KUBECONFIG` may list several files, of which the first that has an entry counts.
Without a file, a process in a pod uses its service account.
"""

from __future__ import annotations

import base64
import os
import ssl
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import yaml

from meshwright_cli.client.credentials import Credentials, ExecPlugin, StaticToken, TokenFile
from meshwright_cli.client.errors import ConfigurationError, suggestion
from meshwright_cli.client.proxies import checked_proxy

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
DEFAULT_NAMESPACE = "default"
_EXEC_EXTENSION = "client.authentication.k8s.io/exec"
"""The extension of a cluster whose content is for credential plugins."""


@dataclass(frozen=True, slots=True)
class Connection:
    """How to reach one API server. `repr` shows no secret."""

    url: str
    context: str = ""
    """Name of the kubeconfig context; empty in a pod."""
    namespace: str = DEFAULT_NAMESPACE
    credentials: Credentials = field(default_factory=StaticToken, repr=False)
    ca_pem: str | None = field(default=None, repr=False)
    """Certificates to trust; None: those of the system."""
    client_pem: str | None = field(default=None, repr=False)
    """Client certificate and private key, concatenated."""
    verify: bool = True
    server_name: str | None = None
    """Name in the server's certificate, if it is not the host of the URL."""
    proxy: str | None = None
    """Proxy of the cluster; None: that of the environment, see `environment_proxy`."""
    headers: Sequence[tuple[str, str]] = ()
    """Further headers, such as those of impersonation; a name may be there several times."""

    @property
    def where(self) -> str:
        """The cluster, for messages."""
        return f"{self.url} (context `{self.context}`)" if self.context else self.url

    def ssl_context(self, client_pem: str | None = None) -> ssl.SSLContext | None:
        """The TLS settings, or None for plain HTTP. `client_pem` replaces the certificate of the kubeconfig file."""
        if not self.url.startswith("https://"):
            return None
        context = ssl.create_default_context(cadata=self.ca_pem)
        # Python 3.13 requires extensions that the certificates of many clusters lack, and kubectl accepts.
        context.verify_flags &= ~ssl.VERIFY_X509_STRICT
        if not self.verify:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        pem = client_pem or self.client_pem
        if pem:
            # The ssl module reads key pairs only from files. This file is private and deleted at once.
            with tempfile.NamedTemporaryFile("w", suffix=".pem") as file:
                file.write(pem)
                file.flush()
                context.load_cert_chain(file.name)
        return context


def connection(kubeconfig: Path | None = None, context: str | None = None, namespace: str | None = None) -> Connection:
    """The connection that kubectl would use with these options.

    Args:
        kubeconfig: a file instead of `KUBECONFIG` and `~/.kube/config`.
        context: a context instead of the current one.
        namespace: instead of that of the context.

    Raises:
        ConfigurationError: there is no configuration, or it cannot be used. The message names the file and the field.
    """
    files = [kubeconfig] if kubeconfig else _files()
    if kubeconfig is None and not any(file.exists() for file in files):
        if context is None and (inside := _in_cluster(namespace)) is not None:
            return inside
        names = ", ".join(str(file) for file in files)
        raise ConfigurationError(
            f"no kubeconfig: {names} does not exist. Set KUBECONFIG, pass --kubeconfig FILE, or start a cluster on "
            "this machine with `meshwright local up`"
        )
    return _Merged.read(files).connection(context, namespace)


def contexts(kubeconfig: Path | None = None) -> list[str]:
    """Names of all contexts, for completion."""
    return sorted(_Merged.read([kubeconfig] if kubeconfig else _files()).sections["contexts"])


def _files() -> list[Path]:
    listed = [Path(part) for part in os.environ.get("KUBECONFIG", "").split(os.pathsep) if part]
    return listed or [Path.home() / ".kube" / "config"]


def _in_cluster(namespace: str | None) -> Connection | None:
    host, port = os.environ.get("KUBERNETES_SERVICE_HOST"), os.environ.get("KUBERNETES_SERVICE_PORT", "443")
    token = SERVICE_ACCOUNT / "token"
    if not host or not token.exists():
        return None
    own = SERVICE_ACCOUNT / "namespace"
    return Connection(
        url=f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}",
        namespace=namespace or (own.read_text().strip() if own.exists() else DEFAULT_NAMESPACE),
        credentials=TokenFile(token),
        ca_pem=(SERVICE_ACCOUNT / "ca.crt").read_text(),
    )


@dataclass(frozen=True, slots=True)
class _Entry:
    """One entry of a kubeconfig file, and the file, to which its paths are relative."""

    value: dict[str, Any]
    file: Path

    def pem(self, name: str) -> str | None:
        """The PEM text of `NAME-data`, or of the file in `NAME`."""
        try:
            if data := self.value.get(f"{name}-data"):
                return base64.b64decode(str(data)).decode()
            path = self.value.get(name)
            return (self.file.parent / str(path)).read_text() if path else None
        except (OSError, ValueError) as error:
            raise ConfigurationError(f"{self.file}: `{name}` cannot be read: {error}") from error


class _Merged:
    """Several kubeconfig files as one."""

    def __init__(self) -> None:
        self.files: list[Path] = []
        self.sections: dict[str, dict[str, _Entry]] = {"contexts": {}, "clusters": {}, "users": {}}
        self.current = ""

    @classmethod
    def read(cls, files: Sequence[Path]) -> _Merged:
        """Read the files that exist; the first one with an entry counts."""
        merged = cls()
        for file in files:
            if file.exists() or len(files) == 1:
                merged._add(file)
        return merged

    def _add(self, file: Path) -> None:
        try:
            config = yaml.safe_load(file.read_text())
        except OSError as error:
            raise ConfigurationError(f"{file}: {error.strerror}") from error
        except (yaml.YAMLError, ValueError) as error:
            raise ConfigurationError(f"{file}: not valid YAML: {error}") from error
        if not isinstance(config, dict):
            raise ConfigurationError(f"{file}: not a kubeconfig file: it has no `contexts`")
        self.files.append(file)
        self.current = self.current or str(config.get("current-context") or "")
        for section, field_name in (("contexts", "context"), ("clusters", "cluster"), ("users", "user")):
            for entry in config.get(section) or ():
                if isinstance(entry, dict) and entry.get("name"):
                    value = entry.get(field_name)
                    self.sections[section].setdefault(
                        str(entry["name"]), _Entry(value if isinstance(value, dict) else {}, file)
                    )

    def _entry(self, section: str, name: str) -> _Entry:
        found = self.sections[section].get(name)
        if found is None:
            files = ", ".join(map(str, self.files))
            singular = section.removesuffix("s")
            hint = suggestion(name, self.sections[section])
            known = "" if hint else f". It has: {', '.join(sorted(self.sections[section])) or 'none'}"
            raise ConfigurationError(f"{files}: no {singular} named `{name}`{hint}{known}")
        return found

    def connection(self, context: str | None, namespace: str | None) -> Connection:
        """The connection of a context."""
        name = context or self.current
        if not name:
            files = ", ".join(map(str, self.files))
            raise ConfigurationError(
                f"{files}: no `current-context`: select one with `kubectl config use-context NAME`"
            )
        chosen = self._entry("contexts", name)
        cluster = self._entry("clusters", str(chosen.value.get("cluster") or ""))
        user = self._entry("users", str(chosen.value["user"])) if chosen.value.get("user") else _Entry({}, chosen.file)
        if not cluster.value.get("server"):
            raise ConfigurationError(f"{cluster.file}: cluster `{chosen.value.get('cluster')}` has no `server`")
        certificate, key = user.pem("client-certificate"), user.pem("client-key")
        authority = cluster.pem("certificate-authority")
        return Connection(
            url=_server_url(cluster, tls=bool(authority or certificate)),
            context=name,
            namespace=namespace or str(chosen.value.get("namespace") or DEFAULT_NAMESPACE),
            credentials=_credentials(user, _cluster_info(cluster.value, authority)),
            ca_pem=authority,
            client_pem=f"{certificate}\n{key}" if certificate and key else None,
            verify=not cluster.value.get("insecure-skip-tls-verify", False),
            server_name=cluster.value.get("tls-server-name"),
            proxy=_proxy(cluster),
            headers=_impersonation(user),
        )


def _server_url(cluster: _Entry, *, tls: bool) -> str:
    """The URL of `server`. Without a scheme it is HTTPS if there is a certificate, as in kubectl."""
    server = str(cluster.value["server"])
    url = server if "://" in server else f"{'https' if tls else 'http'}://{server}"
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and " " not in url and parts.port != 0
    except ValueError:
        usable = False
    if not usable:
        raise ConfigurationError(f"{cluster.file}: `server: {server}` must be a URL such as https://HOST:6443")
    return url.rstrip("/")


def _proxy(cluster: _Entry) -> str | None:
    url = cluster.value.get("proxy-url")
    if not url:
        return None
    try:
        return checked_proxy(str(url))
    except ValueError as error:
        raise ConfigurationError(f"{cluster.file}: `proxy-url`: {error}") from None


def _cluster_info(cluster: Mapping[str, Any], authority: str | None) -> dict[str, Any]:
    """`spec.cluster` of an ExecCredential: what a plugin may need to know of the cluster."""
    found = {name: cluster[name] for name in ("server", "tls-server-name", "proxy-url") if cluster.get(name)}
    if cluster.get("insecure-skip-tls-verify"):
        found["insecure-skip-tls-verify"] = True
    if authority:
        found["certificate-authority-data"] = base64.b64encode(authority.encode()).decode()
    for extension in cluster.get("extensions") or ():
        if isinstance(extension, dict) and extension.get("name") == _EXEC_EXTENSION:
            found["config"] = extension.get("extension")
    return found


def _credentials(user: _Entry, cluster: Mapping[str, Any]) -> Credentials:
    if "auth-provider" in user.value:
        raise ConfigurationError(
            f"{user.file}: `auth-provider` was removed from Kubernetes clients: use an `exec` plugin of your provider"
        )
    if plugin := user.value.get("exec"):
        return ExecPlugin.of(plugin, user.file, cluster)
    if user.value.get("username"):
        secret = f"{user.value['username']}:{user.value.get('password', '')}"
        return StaticToken(basic=base64.b64encode(secret.encode()).decode())
    if file := user.value.get("tokenFile"):
        return TokenFile(user.file.parent / str(file))
    if user.value.get("token"):
        return StaticToken(str(user.value["token"]))
    return StaticToken()


def _impersonation(user: _Entry) -> list[tuple[str, str]]:
    """The headers of impersonation: of `as`, and of its UID, groups and further fields."""
    uid, groups, extra = (user.value.get(name) for name in ("as-uid", "as-groups", "as-user-extra"))
    if not user.value.get("as"):
        if uid or groups or extra:
            raise ConfigurationError(f"{user.file}: `as-uid`, `as-groups` and `as-user-extra` need `as`: add the user")
        return []
    headers = [("Impersonate-User", str(user.value["as"]))]
    headers += [("Impersonate-Uid", str(uid))] if uid else []
    headers += [("Impersonate-Group", str(group)) for group in groups or ()]
    for key, values in (extra or {}).items():
        headers += [(f"Impersonate-Extra-{quote(str(key).lower(), safe='')}", str(value)) for value in values or ()]
    return headers
