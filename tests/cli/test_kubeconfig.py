"""Which cluster and credentials the client uses: the rules of kubectl."""

from __future__ import annotations

import base64
import json
import os
import pty
import ssl
import stat
from pathlib import Path
from typing import Any

import pytest
import yaml
from aiohttp import web
from aiohttp.test_utils import TestServer

from meshwright_cli.client import kubeconfig
from meshwright_cli.client.api_server import PODS, ApiServer
from meshwright_cli.client.errors import ConfigurationError
from meshwright_cli.client.kubeconfig import Connection, connection, contexts
from meshwright_cli.client.proxies import environment_proxy


def config(name: str, url: str, user: dict[str, Any] | None = None, **cluster: Any) -> dict[str, Any]:
    return {
        "current-context": name,
        "contexts": [{"name": name, "context": {"cluster": name, "user": name, "namespace": f"{name}-space"}}],
        "clusters": [{"name": name, "cluster": {"server": url, **cluster}}],
        "users": [{"name": name, "user": user or {}}],
    }


def written(path: Path, body: dict[str, Any]) -> Path:
    path.write_text(yaml.safe_dump(body))
    return path


@pytest.fixture(autouse=True)
def nothing_outside(monkeypatch, tmp_path):
    for name in ("KUBECONFIG", "KUBERNETES_SERVICE_HOST"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


def test_several_files_are_merged_and_the_first_counts(monkeypatch, tmp_path):
    first = written(tmp_path / "a", config("a", "https://a"))
    second = written(tmp_path / "b", {**config("b", "https://b"), "current-context": "b"})
    monkeypatch.setenv("KUBECONFIG", f"{first}:{tmp_path / 'none'}:{second}")
    assert connection().url == "https://a"
    assert connection().namespace == "a-space"
    assert connection(context="b", namespace="x").namespace == "x"
    assert contexts() == ["a", "b"]


def test_home_is_the_default(tmp_path):
    (tmp_path / "home" / ".kube").mkdir(parents=True)
    written(tmp_path / "home" / ".kube" / "config", config("home", "https://home/"))
    assert connection().url == "https://home"


def test_no_configuration_names_what_to_do():
    with pytest.raises(ConfigurationError, match="meshwright local up"):
        connection()


def test_in_a_pod_the_service_account_is_used(monkeypatch, tmp_path):
    for name, text in (("token", "secret\n"), ("ca.crt", "CA"), ("namespace", "team")):
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(kubeconfig, "SERVICE_ACCOUNT", tmp_path)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    found = connection()
    assert (found.url, found.namespace, found.ca_pem) == ("https://10.0.0.1:443", "team", "CA")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("a: [", "not valid YAML"),
        ("[]", "it has no `contexts`"),
        (yaml.safe_dump({**config("prod", "https://x"), "current-context": ""}), "use-context"),
        (yaml.safe_dump({**config("prod", "https://x"), "current-context": "prd"}), "did you mean `prod`"),
        (yaml.safe_dump({**config("prod", "https://x"), "clusters": []}), "no cluster named `prod`"),
        (yaml.safe_dump(config("prod", "")), "has no `server`"),
        (yaml.safe_dump(config("prod", "https://x:port")), "`server: https://x:port` must be a URL"),
        (yaml.safe_dump(config("prod", "ftp://x")), "`server: ftp://x` must be a URL"),
        (yaml.safe_dump(config("prod", "https://x", {"as-groups": ["g"]})), "need `as`: add the user"),
        (yaml.safe_dump(config("prod", "https://x", {"auth-provider": {"name": "gcp"}})), "use an `exec` plugin"),
        (
            yaml.safe_dump(config("prod", "https://x", {"client-certificate": "none.pem"})),
            "`client-certificate` cannot",
        ),
    ],
)
def test_a_file_that_cannot_be_used_names_the_field(tmp_path, body, message):
    file = tmp_path / "config"
    file.write_text(body)
    with pytest.raises(ConfigurationError, match=message):
        connection(file)


async def authorization(file: Path) -> str:
    return (await connection(file).credentials.current()).authorization


async def test_credentials(tmp_path):
    (tmp_path / "token").write_text("from-file\n")
    users: list[tuple[dict[str, Any], str]] = [
        ({"token": "abc"}, "Bearer abc"),
        ({"tokenFile": "token"}, "Bearer from-file"),
        ({"tokenFile": "token", "token": "abc"}, "Bearer from-file"),
        ({"username": "u", "password": "p"}, "Basic dTpw"),
        ({}, ""),
    ]
    for user, expected in users:
        assert await authorization(written(tmp_path / "config", config("a", "https://a", user))) == expected


def plugin(tmp_path: Path, text: str, cluster: dict[str, Any] | None = None, **fields: Any) -> Path:
    file = tmp_path / "plugin"
    file.write_text(f"#!/bin/sh\n{text}\n")
    file.chmod(file.stat().st_mode | stat.S_IXUSR)
    user = {"exec": {"apiVersion": "client.authentication.k8s.io/v1", "command": "./plugin", "args": ["get"],
                     "env": [{"name": "WHO", "value": "me"}], "installHint": "Install it from x",
                     **fields}}  # fmt: skip
    return written(tmp_path / "config", config("a", "https://a", user, **cluster or {}))


async def test_a_plugin_provides_a_token_until_it_expires(tmp_path):
    file = plugin(tmp_path, 'echo x >> "$0.calls"; echo "{\\"status\\": {\\"token\\": \\"$WHO-$1\\"}}"')
    credentials = connection(file).credentials
    assert [(await credentials.current()).authorization for _ in range(2)] == ["Bearer me-get"] * 2
    assert (tmp_path / "plugin.calls").read_text() == "x\n"
    expired = '{\\"status\\": {\\"token\\": \\"t\\", \\"expirationTimestamp\\": \\"2020-01-01T00:00:00Z\\"}}'
    credentials = connection(plugin(tmp_path, f'echo x >> "$0.calls"; echo "{expired}"')).credentials
    for _ in range(2):
        await credentials.current()
    assert (tmp_path / "plugin.calls").read_text() == "x\n" * 3


@pytest.mark.parametrize(
    ("text", "message"),
    [("echo expired >&2; exit 3", "exited with code 3: expired"), ("echo hello", "printed no ExecCredential")],
)
async def test_a_plugin_that_fails_is_named(tmp_path, text, message):
    with pytest.raises(ConfigurationError, match=message):
        await authorization(plugin(tmp_path, text))


async def test_a_missing_plugin_has_its_hint(tmp_path):
    file = plugin(tmp_path, "")
    (tmp_path / "plugin").unlink()
    with pytest.raises(ConfigurationError, match="Install it from x"):
        await authorization(file)


def test_nothing_shows_secrets(tmp_path):
    file = written(tmp_path / "config", config("a", "https://a", {"token": "hunter2"}))
    assert "hunter2" not in repr(connection(file))


async def test_a_plugin_is_told_of_the_cluster_if_it_asks(tmp_path):
    text = """echo "$KUBERNETES_EXEC_INFO" > "$0.info"; echo '{"status": {"token": "t"}}'"""
    extensions = [{"name": "client.authentication.k8s.io/exec", "extension": {"audience": "me"}}]
    cluster = {"certificate-authority-data": base64.b64encode(b"PEM").decode(), "extensions": extensions}
    for asks in (True, False):
        await authorization(plugin(tmp_path, text, cluster, provideClusterInfo=asks))
        told = json.loads((tmp_path / "plugin.info").read_text())["spec"]
        expected = {"server": "https://a", "config": {"audience": "me"}}
        expected["certificate-authority-data"] = cluster["certificate-authority-data"]
        assert told == ({"cluster": expected} if asks else {}) | {"interactive": False}


async def test_what_a_plugin_asks_in_a_terminal_is_shown(monkeypatch, tmp_path, capsys):
    text = """echo "enter code X" >&2; read answer; echo "{\\"status\\": {\\"token\\": \\"$answer\\"}}\""""
    controller, terminal = pty.openpty()
    os.write(controller, b"typed\n")
    with os.fdopen(terminal, "rb") as stdin:
        saved = os.dup(0)
        os.dup2(stdin.fileno(), 0)
        try:
            monkeypatch.setattr("sys.stdin", stdin)
            assert await authorization(plugin(tmp_path, text, interactiveMode="Always")) == "Bearer typed"
            assert "enter code X" in capsys.readouterr().err
            with pytest.raises(ConfigurationError, match="has neither a token nor a certificate"):
                await authorization(plugin(tmp_path, text, interactiveMode="Never"))
        finally:
            os.dup2(saved, 0)
            os.close(saved)
            os.close(controller)


async def test_a_plugin_that_has_to_ask_needs_a_terminal(monkeypatch, tmp_path):
    monkeypatch.setattr("sys.stdin", None)
    with pytest.raises(ConfigurationError, match="standard input is not a terminal"):
        await authorization(plugin(tmp_path, "", interactiveMode="Always"))


def test_impersonation_has_all_its_headers(tmp_path):
    user = {"as": "jane", "as-uid": "7", "as-groups": ["dev", "ops"], "as-user-extra": {"Team/A": ["x"]}}
    assert connection(written(tmp_path / "config", config("a", "https://a", user))).headers == [
        ("Impersonate-User", "jane"),
        ("Impersonate-Uid", "7"),
        ("Impersonate-Group", "dev"),
        ("Impersonate-Group", "ops"),
        ("Impersonate-Extra-team%2Fa", "x"),
    ]


@pytest.mark.parametrize(
    ("server", "tls", "url"),
    [("localhost:8080", False, "http://localhost:8080"), ("10.0.0.1:6443", True, "https://10.0.0.1:6443")],
)
def test_a_server_without_a_scheme(tmp_path, server, tls, url):
    authority = {"certificate-authority-data": base64.b64encode(b"PEM").decode()} if tls else {}
    assert connection(written(tmp_path / "config", config("a", server, **authority))).url == url


def test_certificates_need_no_extensions_that_kubectl_does_not_need():
    context = Connection("https://a").ssl_context()
    assert context is not None
    assert not context.verify_flags & ssl.VERIFY_X509_STRICT


@pytest.mark.parametrize(
    ("url", "no_proxy", "proxy"),
    [
        ("https://api.example.com", "", "http://proxy:3128"),
        ("http://api.example.com", "", None),
        ("https://localhost:6443", "", None),
        ("https://127.0.0.3:6443", "", None),
        ("https://[::1]:6443", "", None),
        ("https://10.1.2.3:6443", "10.0.0.0/8,.cluster.local", None),
        ("https://11.1.2.3:6443", "10.0.0.0/8", "http://proxy:3128"),
        ("https://10.1.2.3", "10.1.2.3", None),
        ("https://[fd00::1]", "fd00::/8", None),
        ("https://api.example.com", "other.com, example.com", None),
        ("https://example.com", ".example.com", "http://proxy:3128"),
        ("https://a.example.com", "*.example.com", None),
        ("https://notexample.com", "example.com", "http://proxy:3128"),
        ("https://api.example.com:6443", "example.com:443", "http://proxy:3128"),
        ("https://api.example.com", "example.com:443", None),
        ("https://api.example.com", "*", None),
    ],
)
def test_the_environment_names_a_proxy_as_for_kubectl(monkeypatch, url, no_proxy, proxy):
    for name in ("https_proxy", "http_proxy", "no_proxy", "HTTP_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HTTPS_PROXY", "proxy:3128")
    monkeypatch.setenv("NO_PROXY", no_proxy)
    assert environment_proxy(url) == proxy


def test_a_proxy_of_another_kind_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("HTTPS_PROXY", "socks5://proxy:1080")
    monkeypatch.delenv("NO_PROXY", raising=False)
    with pytest.raises(ConfigurationError, match="HTTPS_PROXY: proxies of the kind `socks5` are not supported"):
        environment_proxy("https://a")
    told = config("a", "https://a", **{"proxy-url": "socks5://proxy:1080"})
    with pytest.raises(ConfigurationError, match="`proxy-url`: proxies of the kind `socks5`"):
        connection(written(tmp_path / "config", told))


async def test_passwords_of_netrc_are_not_used(monkeypatch, tmp_path):
    (tmp_path / "netrc").write_text("default login someone password else\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    seen = []

    async def answer(request: web.Request) -> web.Response:
        seen.append((request.headers["Authorization"], request.headers.getall("Impersonate-Group", [])))
        return web.json_response({"metadata": {}, "items": []})

    app = web.Application()
    app.router.add_get("/{path:.*}", answer)
    async with TestServer(app) as server:
        user = {"token": "abc", "as": "jane", "as-groups": ["dev", "ops"]}
        api = ApiServer(connection(written(tmp_path / "config", config("a", str(server.make_url("")), user))))
        await api.collect(PODS, "a")
        await api.close()
    assert seen == [("Bearer abc", ["dev", "ops"])]
