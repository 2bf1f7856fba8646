"""The rights that the chart grants the operator, read from its own text, so that tests run under no others."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import yaml

from meshwright.api.objects import KubeObject

HELPERS = Path(__file__).parents[2] / "helm" / "meshwright" / "templates" / "_helpers.tpl"
RBAC = "/apis/rbac.authorization.k8s.io/v1"
ACCOUNT = "meshwright-operator"
TOKEN_SECONDS = 36000


def rules(name: str, lease: str = ACCOUNT) -> list[KubeObject]:
    """The rules of a named template of the chart, such as `namespacedRules`."""
    found = re.search(rf'define "meshwright\.{name}" -}}}}\n(.*?){{{{- end }}}}', HELPERS.read_text(), re.DOTALL)
    assert found is not None, name
    loaded: list[KubeObject] = yaml.safe_load(found[1].replace('{{ include "meshwright.name" . }}', lease))
    return loaded


def rights(optional: Sequence[str] = ()) -> set[tuple[str, str, str]]:
    """Group, resource and verb of everything that the operator may do."""
    return {
        (group, resource, verb)
        for name in ("clusterRules", "namespacedRules", "leaseRules", "credentialsRules", *optional)
        for rule in rules(name)
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


def objects(
    namespaces: Sequence[str] = (), home: str = "default", lease: str = ACCOUNT, optional: Sequence[str] = ()
) -> Iterator[tuple[str, KubeObject]]:
    """Collections and what is to be created in them: the service account in `home`, roles and their bindings.

    `optional` names templates with rules of the namespaces that the chart adds for a value.
    """
    namespaced = rules("namespacedRules") + [rule for name in optional for rule in rules(name)]
    account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": ACCOUNT}}
    yield f"/api/v1/namespaces/{home}/serviceaccounts", account
    everywhere = rules("clusterRules") + ([] if namespaces else namespaced)
    yield from _granted(everywhere, None, home, ACCOUNT)
    for namespace in namespaces:
        yield from _granted(namespaced, namespace, home, ACCOUNT)
    yield from _granted(rules("leaseRules", lease), home, home, f"{ACCOUNT}-lease")
    yield from _granted(rules("credentialsRules", lease), home, home, f"{ACCOUNT}-credentials")


def token_request(home: str = "default") -> tuple[str, KubeObject]:
    """Where to ask for the account's token, and how."""
    body = {
        "apiVersion": "authentication.k8s.io/v1",
        "kind": "TokenRequest",
        "spec": {"expirationSeconds": TOKEN_SECONDS},
    }
    return f"/api/v1/namespaces/{home}/serviceaccounts/{ACCOUNT}/token", body


def _granted(
    granted: list[KubeObject], namespace: str | None, home: str, name: str
) -> Iterator[tuple[str, KubeObject]]:
    where, prefix = (f"/namespaces/{namespace}", "") if namespace else ("", "Cluster")
    version = {"apiVersion": "rbac.authorization.k8s.io/v1", "metadata": {"name": name}}
    yield f"{RBAC}{where}/{prefix.lower()}roles", {**version, "kind": f"{prefix}Role", "rules": granted}
    binding = {
        **version,
        "kind": f"{prefix}RoleBinding",
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": f"{prefix}Role", "name": name},
        "subjects": [{"kind": "ServiceAccount", "name": ACCOUNT, "namespace": home}],
    }
    yield f"{RBAC}{where}/{prefix.lower()}rolebindings", binding
