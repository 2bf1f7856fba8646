"""Which cluster and credentials the client uses: the rules of kubectl."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Any

import pytest
import yaml

from meshwright_cli.client import kubeconfig
from meshwright_cli.client.errors import ConfigurationError
from meshwright_cli.client.kubeconfig import connection, contexts


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
        ({"username": "u", "password": "p"}, "Basic dTpw"),
        ({}, ""),
    ]
    for user, expected in users:
        assert await authorization(written(tmp_path / "config", config("a", "https://a", user))) == expected


def plugin(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "plugin"
    file.write_text(f"#!/bin/sh\n{text}\n")
    file.chmod(file.stat().st_mode | stat.S_IXUSR)
    user = {"exec": {"apiVersion": "client.authentication.k8s.io/v1", "command": "./plugin", "args": ["get"],
                     "env": [{"name": "WHO", "value": "me"}], "installHint": "Install it from x"}}  # fmt: skip
    return written(tmp_path / "config", config("a", "https://a", user))


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
