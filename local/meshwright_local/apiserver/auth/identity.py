"""Authentication and authorization: bearer tokens, impersonation, roles and bindings (RBAC), and reviews.

Service account tokens have the form of JWTs, signed with a key that only this server knows, so they can be verified
without being stored. Every user that may write roles may write any role: unlike a real server, this one does not check
the `escalate` and `bind` verbs. An aggregated cluster role has the rules of the others, but does not show them.
"""

from __future__ import annotations

import base64
import datetime
import hashlib
import hmac
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from meshwright.api.objects import KubeObject
from meshwright_local.apiserver.auth.user_roles import rules_of, user_roles
from meshwright_local.apiserver.status_errors import ApiError, bad_request
from meshwright_local.apiserver.store import Store

ADMINS, AUTHENTICATED = "system:masters", "system:authenticated"
ANONYMOUS, UNAUTHENTICATED = "system:anonymous", "system:unauthenticated"
SERVICE_ACCOUNT, SERVICE_ACCOUNTS = "system:serviceaccount:", "system:serviceaccounts"
ISSUER = "https://kubernetes.default.svc"
RBAC = "rbac.authorization.k8s.io"
_MIN_SECONDS, _DEFAULT_SECONDS = 600, 3600
_PUBLIC_PATHS = ["/healthz", "/livez", "/readyz", "/version", "/version/"]
_DISCOVERY_PATHS = [
    "/.well-known",
    "/.well-known/*",
    "/api",
    "/api/*",
    "/apis",
    "/apis/*",
    "/openapi",
    "/openapi/*",
    *_PUBLIC_PATHS,
]


@dataclass(frozen=True, slots=True)
class User:
    """An authenticated user, or the anonymous one."""

    name: str
    groups: tuple[str, ...] = ()
    uid: str = ""

    def info(self) -> KubeObject:
        """The `userInfo` of reviews."""
        return {"username": self.name, "groups": list(self.groups), **({"uid": self.uid} if self.uid else {})}


@dataclass(frozen=True, slots=True)
class RequestAttributes:
    """Attributes of a request: a verb on a resource, or on a non-resource path."""

    verb: str
    group: str = ""
    plural: str = ""
    subresource: str = ""
    namespace: str = ""
    name: str = ""
    path: str = ""

    @property
    def resource(self) -> str:
        """The resource as in rules, such as `pods/log`."""
        return f"{self.plural}/{self.subresource}" if self.subresource else self.plural


def admin() -> User:
    """Return the user that may do everything."""
    return User("kubernetes-admin", (ADMINS, AUTHENTICATED))


def impersonated(user: str, groups: list[str], uid: str) -> User:
    """Return the user that an administrator impersonates."""
    if user.startswith(SERVICE_ACCOUNT):
        namespace = user.removeprefix(SERVICE_ACCOUNT).partition(":")[0]
        groups = [*groups, SERVICE_ACCOUNTS, f"{SERVICE_ACCOUNTS}:{namespace}"]
    added = UNAUTHENTICATED if user == ANONYMOUS else AUTHENTICATED
    return User(user, tuple(dict.fromkeys([*groups, added])), uid)


class Authenticator:
    """Tokens and the users behind them.

    Args:
        tokens: static tokens.
        key: signs service account tokens; a new key invalidates all earlier tokens.
        account_exists: returns whether the service account with a namespace, name and uid still exists.
    """

    def __init__(self, tokens: Mapping[str, User], key: bytes, account_exists: Callable[[str, str, str], bool]) -> None:
        self._tokens = {hashlib.sha256(token.encode()).digest(): user for token, user in tokens.items()}
        self._key = key
        self._account_exists = account_exists

    def authenticate(self, authorization: str) -> User:
        """Return the user of an Authorization header, the anonymous one if there is none; raises ApiError 401."""
        if not authorization:
            return User(ANONYMOUS, (UNAUTHENTICATED,))
        scheme, _, token = authorization.partition(" ")
        user = self.identify(token.strip()) if scheme.lower() == "bearer" else None
        if user is None:
            raise ApiError(401, "Unauthorized", "Unauthorized")
        return user

    def identify(self, token: str) -> User | None:
        """Return the user of a token; None if it is invalid. Static tokens are compared by their hash."""
        return self._tokens.get(hashlib.sha256(token.encode()).digest()) or self._service_account(token)

    def token_request(self, account: KubeObject, request: KubeObject) -> KubeObject:
        """Return the response to a TokenRequest for a service account; raises ApiError 400 for a malformed spec."""
        spec = request.get("spec") or {}
        seconds, audiences = spec.get("expirationSeconds"), spec.get("audiences") or []
        if not isinstance(seconds, int | None) or not isinstance(audiences, list):
            raise bad_request("spec.expirationSeconds must be a number and spec.audiences a list")
        token, expiry = self.issue(account, seconds, audiences)
        moment = datetime.datetime.fromtimestamp(expiry, datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        return {**request, "status": {"token": token, "expirationTimestamp": moment}}

    def issue(self, account: KubeObject, seconds: int | None, audiences: list[str]) -> tuple[str, int]:
        """Return a token for a service account, and its expiration in seconds since 1970."""
        now, metadata = int(time.time()), account["metadata"]
        expiry = now + min(max(_MIN_SECONDS, seconds or _DEFAULT_SECONDS), 1 << 32)
        claims = {
            "iss": ISSUER,
            "aud": audiences or [ISSUER],
            "sub": f"{SERVICE_ACCOUNT}{metadata['namespace']}:{metadata['name']}",
            **{"iat": now, "nbf": now, "exp": expiry, "jti": secrets.token_hex(16)},
            "kubernetes.io": {
                "namespace": metadata["namespace"],
                "serviceaccount": {"name": metadata["name"], "uid": metadata["uid"]},
            },
        }
        unsigned = f"{_encode(orjson.dumps({'alg': 'HS256', 'typ': 'JWT'}))}.{_encode(orjson.dumps(claims))}"
        return f"{unsigned}.{_encode(self._sign(unsigned))}", expiry

    def _sign(self, unsigned: str) -> bytes:
        return hmac.new(self._key, unsigned.encode(), hashlib.sha256).digest()

    def _service_account(self, token: str) -> User | None:
        unsigned, dot, signature = token.rpartition(".")
        try:
            if not dot or not hmac.compare_digest(_decode(signature), self._sign(unsigned)):
                return None
            claims = orjson.loads(_decode(unsigned.partition(".")[2]))
        except (ValueError, UnicodeEncodeError):
            return None
        namespace, account = claims["kubernetes.io"]["namespace"], claims["kubernetes.io"]["serviceaccount"]
        good = claims["exp"] >= time.time() and ISSUER in claims["aud"]
        if not good or not self._account_exists(namespace, account["name"], account["uid"]):
            return None
        groups = (SERVICE_ACCOUNTS, f"{SERVICE_ACCOUNTS}:{namespace}", AUTHENTICATED)
        return User(claims["sub"], groups, account["uid"])


def _encode(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def _decode(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))


def initial_roles() -> Iterator[tuple[str, KubeObject]]:
    """Return the cluster roles and bindings that exist from the start: (plural, object)."""
    every = [{"apiGroups": ["*"], "resources": ["*"], "verbs": ["*"]}, {"nonResourceURLs": ["*"], "verbs": ["*"]}]
    own = {"authorization.k8s.io": ["selfsubjectaccessreviews", "selfsubjectrulesreviews"]}
    own["authentication.k8s.io"] = ["selfsubjectreviews"]
    basic: list[Any] = [{"apiGroups": [group], "resources": names, "verbs": ["create"]} for group, names in own.items()]
    for role in user_roles():
        yield "clusterroles", role
    for name, rules, groups in (
        ("cluster-admin", every, [ADMINS]),
        ("system:basic-user", basic, [AUTHENTICATED]),
        ("system:discovery", [{"nonResourceURLs": _DISCOVERY_PATHS, "verbs": ["get"]}], [AUTHENTICATED]),
        (
            "system:public-info-viewer",
            [{"nonResourceURLs": _PUBLIC_PATHS, "verbs": ["get"]}],
            [AUTHENTICATED, UNAUTHENTICATED],
        ),
    ):
        labels = {"kubernetes.io/bootstrapping": "rbac-defaults"}
        yield "clusterroles", {"metadata": {"name": name, "labels": labels}, "rules": rules}
        subjects = [{"kind": "Group", "apiGroup": RBAC, "name": group} for group in groups]
        reference = {"apiGroup": RBAC, "kind": "ClusterRole", "name": name}
        metadata = {"name": name, "labels": labels}
        yield "clusterrolebindings", {"metadata": metadata, "subjects": subjects, "roleRef": reference}


class Authorizer:
    """Decides by the roles and bindings in the cluster."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def allows(self, user: User, attributes: RequestAttributes) -> bool:
        """Return whether a user may do something. Administrators may do everything, regardless of roles."""
        return ADMINS in user.groups or any(_allows(r, attributes) for r in self.rules(user, attributes.namespace))

    def rules(self, user: User, namespace: str) -> Iterator[KubeObject]:
        """Return the rules that apply to a user: cluster-wide ones, and those of a namespace if one is given."""
        bindings = [*self._store.all((RBAC, "clusterrolebindings"))]
        bindings += self._store.all((RBAC, "rolebindings"), namespace) if namespace else ()
        for binding in bindings:
            if any(_is_subject(s, user, binding) for s in binding.get("subjects") or ()):
                yield from self.role_rules(binding["roleRef"], namespace) or ()

    def role_rules(self, reference: KubeObject, namespace: str) -> list[KubeObject] | None:
        """Return the rules of the role that a binding names; None if it does not exist."""
        plural = "clusterroles" if reference.get("kind") == "ClusterRole" else "roles"
        where = namespace if plural == "roles" else ""
        role = self._store.find((RBAC, plural), where, reference.get("name", ""))
        if role is not None and role.get("aggregationRule"):
            return rules_of(role, self._store.all((RBAC, "clusterroles")))
        return None if role is None else list(role.get("rules") or ())


def _is_subject(subject: KubeObject, user: User, binding: KubeObject) -> bool:
    kind, name = subject.get("kind"), subject.get("name")
    if kind == "ServiceAccount":
        namespace = subject.get("namespace") or binding["metadata"].get("namespace", "")
        return user.name == f"{SERVICE_ACCOUNT}{namespace}:{name}"
    return (kind == "User" and name == user.name) or (kind == "Group" and name in user.groups)


def _allows(rule: KubeObject, attributes: RequestAttributes) -> bool:
    if not {"*", attributes.verb}.intersection(rule.get("verbs") or ()):
        return False
    if attributes.path:
        urls = rule.get("nonResourceURLs") or ()
        return any(u == attributes.path or (u.endswith("*") and attributes.path.startswith(u[:-1])) for u in urls)
    wanted = {"*", attributes.resource, *([f"*/{attributes.subresource}"] if attributes.subresource else [])}
    named = attributes.name in (rule.get("resourceNames") or [attributes.name])
    groups, resources = rule.get("apiGroups") or (), rule.get("resources") or ()
    return named and bool({"*", attributes.group}.intersection(groups)) and bool(wanted.intersection(resources))


def review(
    plural: str, body: KubeObject, user: User, authenticator: Authenticator, authorizer: Authorizer
) -> KubeObject:
    """Answer a review of a user, token or permission; raises ApiError 400 for a malformed spec."""
    spec = body.get("spec") or {}
    if not isinstance(spec, dict):
        raise bad_request("spec must be an object")
    if plural == "selfsubjectreviews":
        status: KubeObject = {"userInfo": user.info()}
    elif plural == "tokenreviews":
        found = authenticator.identify(str(spec.get("token")))
        status = {"authenticated": True, "user": found.info()} if found else {"error": "invalid bearer token"}
    elif plural == "selfsubjectrulesreviews":
        rules = list(authorizer.rules(user, str(spec.get("namespace") or "")))
        groups = {"resourceRules": "resources", "nonResourceRules": "nonResourceURLs"}
        status = {key: [r for r in rules if r.get(field)] for key, field in groups.items()} | {"incomplete": False}
    else:
        if plural == "subjectaccessreviews":
            others = spec.get("groups")
            user = User(str(spec.get("user") or ""), tuple(map(str, others if isinstance(others, list) else ())))
        status = {"allowed": authorizer.allows(user, _attributes(spec))}
    return {"metadata": {"creationTimestamp": None}, **body, "status": status}


def _attributes(spec: KubeObject) -> RequestAttributes:
    on, path = spec.get("resourceAttributes"), spec.get("nonResourceAttributes")
    if isinstance(on, dict):
        field_names = ("verb", "group", "resource", "subresource", "namespace", "name")
        return RequestAttributes(*(str(on.get(word) or "") for word in field_names))
    if isinstance(path, dict):
        return RequestAttributes(str(path.get("verb") or ""), path=str(path.get("path") or ""))
    raise bad_request("spec must have resourceAttributes or nonResourceAttributes")
