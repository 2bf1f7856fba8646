"""Nobody grants rights that they lack: what a user may write into roles and bindings.

A role may have a right only if its writer has it too, or the verb `escalate` on roles. A binding may name a role only
if its writer has all rights of the role, or the verb `bind` on it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import orjson

from meshwright.api.objects import KubeObject
from meshwright_local.apiserver.auth.identity import ADMINS, RBAC, Authorizer, RequestAttributes, User
from meshwright_local.apiserver.resource_types import Resource
from meshwright_local.apiserver.status_errors import forbidden

_PARTS = {
    "apiGroups": "APIGroups",
    "resources": "Resources",
    "nonResourceURLs": "NonResourceURLs",
    "resourceNames": "ResourceNames",
    "verbs": "Verbs",
}
_EVERYTHING: list[KubeObject] = [
    {"apiGroups": ["*"], "resources": ["*"], "verbs": ["*"]},
    {"nonResourceURLs": ["*"], "verbs": ["*"]},
]
# What the garbage collector needs to change before it can delete an object.
_COLLECTED = ("ownerReferences", "finalizers", "managedFields")


@dataclass(frozen=True, slots=True)
class GrantCheck:
    """The check of what one user writes."""

    authorizer: Authorizer
    user: User
    target: RequestAttributes

    def __call__(self, resource: Resource, new: KubeObject, old: KubeObject | None) -> None:
        """Check an object that is created or updated; raises ApiError 403 if it grants what the user lacks."""
        if resource.group != RBAC or ADMINS in self.user.groups or (old is not None and _same(new, old)):
            return
        name = new["metadata"].get("name") or ""
        if resource.plural in ("roles", "clusterroles"):
            if not self._may("escalate", resource.plural, self.target.name):
                self._check_role(resource, name, new, old or {})
        elif not self._may("bind", _plural(new["roleRef"]), new["roleRef"]["name"]):
            rules = self.authorizer.role_rules(new["roleRef"], self.target.namespace)
            if rules is None:
                # As a real server says it: with the kind of the binding.
                raise resource.not_found(new["roleRef"]["name"])
            self._confirm(resource, name, rules)

    def _check_role(self, resource: Resource, name: str, new: KubeObject, old: KubeObject) -> None:
        self._confirm(resource, name, new.get("rules") or ())
        aggregates = any((role.get("aggregationRule") or {}).get("clusterRoleSelectors") for role in (new, old))
        if aggregates and _missing(self._own(), _EVERYTHING):
            text = "must have cluster-admin privileges to use the aggregationRule"
            raise forbidden(resource.group, resource.plural, name, text)

    def _may(self, verb: str, plural: str, name: str) -> bool:
        attributes = RequestAttributes(verb, RBAC, plural, "", self.target.namespace, name)
        return self.authorizer.allows(self.user, attributes)

    def _own(self) -> list[KubeObject]:
        return list(self.authorizer.rules(self.user, self.target.namespace))

    def _confirm(self, resource: Resource, name: str, rules: Sequence[KubeObject]) -> None:
        missing = _missing(self._own(), rules)
        if missing:
            groups = " ".join(_quoted(group) for group in self.user.groups)
            text = f"user {_quoted(self.user.name)} (groups=[{groups}]) is attempting to grant RBAC permissions not "
            lines = "\n".join(sorted(_text(rule) for rule in _compact(missing)))
            raise forbidden(resource.group, resource.plural, name, f"{text}currently held:\n{lines}")


def _plural(reference: KubeObject) -> str:
    return "clusterroles" if reference.get("kind") == "ClusterRole" else "roles"


def _same(new: KubeObject, old: KubeObject) -> bool:
    """Whether an update changes only what the garbage collector changes."""

    def rest(obj: KubeObject) -> KubeObject:
        left = {key: value for key, value in obj["metadata"].items() if key not in _COLLECTED}
        return {**obj, "metadata": left}

    return rest(new) == rest(old)


def _missing(own: Sequence[KubeObject], wanted: Sequence[KubeObject]) -> list[KubeObject]:
    """Return the smallest parts of rules that no rule of a user covers."""
    parts = (part for rule in wanted for part in _parts(rule))
    return [part for part in parts if not any(_covers(rule, part) for rule in own)]


def _parts(rule: KubeObject) -> Iterator[KubeObject]:
    """Split a rule into rules of one verb, one resource and at most one name."""
    names = [[name] for name in rule.get("resourceNames") or ()] or [[]]
    lists = (rule.get("apiGroups") or (), rule.get("resources") or (), rule.get("verbs") or (), names)
    for group, resource, verb, name in product(*lists):
        part: KubeObject = {"apiGroups": [group], "resources": [resource], "verbs": [verb]}
        yield {**part, "resourceNames": name} if name else part
    for path, verb in product(rule.get("nonResourceURLs") or (), rule.get("verbs") or ()):
        yield {"nonResourceURLs": [path], "verbs": [verb]}


def _covers(rule: KubeObject, part: KubeObject) -> bool:
    def has(field: str) -> bool:
        return set(part.get(field) or ()) <= set(rule.get(field) or ()) or "*" in (rule.get(field) or ())

    def of_kind(resource: str) -> bool:
        return "/" in resource and f"*/{resource.partition('/')[2]}" in (rule.get("resources") or ())

    paths = rule.get("nonResourceURLs") or ()
    named = not rule.get("resourceNames") or (part.get("resourceNames") and has("resourceNames"))
    return bool(
        has("verbs")
        and has("apiGroups")
        and (has("resources") or all(of_kind(resource) for resource in part["resources"]))
        and named
        and all(
            any(path == own or (own.endswith("*") and path.startswith(own.rstrip("*"))) for own in paths)
            for path in part.get("nonResourceURLs") or ()
        )
    )


def _compact(rules: Sequence[KubeObject]) -> list[KubeObject]:
    """Join rules that differ only in their verbs."""
    joined: dict[bytes, KubeObject] = {}
    others = []
    for rule in rules:
        if "resources" not in rule:
            others.append(rule)
            continue
        key = orjson.dumps([rule.get(field) for field in ("apiGroups", "resources", "resourceNames")])
        joined.setdefault(key, {**rule, "verbs": []})["verbs"] += rule["verbs"]
    return [*others, *joined.values()]


def _text(rule: KubeObject) -> str:
    parts = (
        f"{name}:[{' '.join(_quoted(item) for item in rule[field])}]"
        for field, name in _PARTS.items()
        if rule.get(field)
    )
    return "{" + ", ".join(parts) + "}"


def _quoted(text: str) -> str:
    return orjson.dumps(text).decode()
