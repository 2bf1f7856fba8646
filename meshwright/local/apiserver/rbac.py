"""Role-based access control: what roles and their bindings allow a user.

Roles can be written by whoever may write roles: unlike a real server, this one does not ask for the `escalate` and
`bind` verbs, and it does not aggregate cluster roles.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from meshwright.local.apiserver.identity import ADMINS, AUTHENTICATED, SERVICE_ACCOUNT, UNAUTHENTICATED, User
from meshwright.local.apiserver.kinds.base import ClusterView

JsonObject = dict[str, Any]
GROUP = "rbac.authorization.k8s.io"

_PUBLIC_PATHS = ("/healthz", "/livez", "/readyz", "/version", "/version/")
_DISCOVERY_PATHS = ("/api", "/api/*", "/apis", "/apis/*", "/openapi", "/openapi/*", *_PUBLIC_PATHS)


@dataclass(frozen=True, slots=True)
class Attempt:
    """Something a user wants to do: a verb on a resource, or on a path outside the resources."""

    verb: str
    group: str = ""
    plural: str = ""
    subresource: str = ""
    namespace: str = ""
    name: str = ""
    path: str = ""

    @property
    def resource(self) -> str:
        """The resource as rules name it, such as `pods/log`."""
        return f"{self.plural}/{self.subresource}" if self.subresource else self.plural


def initial_roles() -> list[tuple[str, JsonObject]]:
    """The cluster roles and bindings that exist from the start: (plural, object)."""
    basic = [
        {"apiGroups": ["authorization.k8s.io"], "resources": [r], "verbs": ["create"]}
        for r in ("selfsubjectaccessreviews", "selfsubjectrulesreviews")
    ] + [{"apiGroups": ["authentication.k8s.io"], "resources": ["selfsubjectreviews"], "verbs": ["create"]}]
    every = {"apiGroups": ["*"], "resources": ["*"], "verbs": ["*"]}
    anywhere = {"nonResourceURLs": ["*"], "verbs": ["*"]}
    discovery = {"nonResourceURLs": list(_DISCOVERY_PATHS), "verbs": ["get"]}
    public = {"nonResourceURLs": list(_PUBLIC_PATHS), "verbs": ["get"]}
    roles: dict[str, tuple[list[JsonObject], tuple[str, ...]]] = {
        "cluster-admin": ([every, anywhere], (ADMINS,)),
        "system:basic-user": (basic, (AUTHENTICATED,)),
        "system:discovery": ([discovery], (AUTHENTICATED,)),
        "system:public-info-viewer": ([public], (AUTHENTICATED, UNAUTHENTICATED)),
    }
    objects: list[tuple[str, JsonObject]] = []
    for name, (rules, groups) in roles.items():
        metadata = {"name": name, "labels": {"kubernetes.io/bootstrapping": "rbac-defaults"}}
        objects.append(("clusterroles", {"metadata": metadata, "rules": rules}))
        subjects = [{"kind": "Group", "apiGroup": GROUP, "name": group} for group in groups]
        reference = {"apiGroup": GROUP, "kind": "ClusterRole", "name": name}
        binding = {"metadata": {**metadata}, "subjects": subjects, "roleRef": reference}
        objects.append(("clusterrolebindings", binding))
    return objects


class Authorizer:
    """Decides by the roles and bindings that stand in the cluster."""

    def __init__(self, view: ClusterView) -> None:
        self._view = view

    def allows(self, user: User, attempt: Attempt) -> bool:
        """Whether a user may do something. Administrators may do everything, whatever the roles say."""
        if ADMINS in user.groups:
            return True
        return any(_rule_allows(rule, attempt) for rule in self.rules(user, attempt.namespace))

    def rules(self, user: User, namespace: str) -> Iterator[JsonObject]:
        """The rules that apply to a user: cluster-wide ones, and those of a namespace when one is named."""
        for binding in self._view.all_of((GROUP, "clusterrolebindings")):
            if _binds(binding, user):
                yield from self._role(binding["roleRef"], "")
        if namespace:
            for binding in self._view.all_of((GROUP, "rolebindings"), namespace):
                if _binds(binding, user):
                    yield from self._role(binding["roleRef"], namespace)

    def _role(self, reference: JsonObject, namespace: str) -> Iterator[JsonObject]:
        clusterwide = reference.get("kind") == "ClusterRole"
        key = (GROUP, "clusterroles" if clusterwide else "roles")
        role = self._view.find(key, "" if clusterwide else namespace, reference.get("name", ""))
        yield from (role or {}).get("rules") or ()


def _binds(binding: JsonObject, user: User) -> bool:
    for subject in binding.get("subjects") or ():
        kind, name = subject.get("kind"), subject.get("name")
        if kind == "ServiceAccount":
            namespace = subject.get("namespace") or binding["metadata"].get("namespace", "")
            if user.name == f"{SERVICE_ACCOUNT}{namespace}:{name}":
                return True
        elif (kind == "User" and name == user.name) or (kind == "Group" and name in user.groups):
            return True
    return False


def _rule_allows(rule: JsonObject, attempt: Attempt) -> bool:
    verbs = rule.get("verbs") or ()
    if "*" not in verbs and attempt.verb not in verbs:
        return False
    if attempt.path:
        return any(
            u in ("*", attempt.path) or (u.endswith("*") and attempt.path.startswith(u[:-1]))
            for u in rule.get("nonResourceURLs") or ()
        )
    groups, resources = rule.get("apiGroups") or (), rule.get("resources") or ()
    if "*" not in groups and attempt.group not in groups:
        return False
    wanted = {"*", attempt.resource}
    if attempt.subresource:
        wanted.add(f"*/{attempt.subresource}")
    if not wanted.intersection(resources):
        return False
    names = rule.get("resourceNames") or ()
    return not names or attempt.name in names
