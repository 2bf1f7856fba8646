"""Reviews: questions about users, tokens and permissions, answered and not stored."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from typing import Any

from meshwright.local.apiserver.clock import rfc3339
from meshwright.local.apiserver.errors import bad_request
from meshwright.local.apiserver.identity import ADMINS, Authenticator, User
from meshwright.local.apiserver.rbac import Attempt, Authorizer

JsonObject = dict[str, Any]


class Reviews:
    """Answers reviews."""

    def __init__(self, authenticator: Authenticator, authorizer: Authorizer) -> None:
        self._authenticator = authenticator
        self._authorizer = authorizer

    def answer(self, plural: str, review: JsonObject, user: User) -> JsonObject:
        """The review with its `status`.

        Raises:
            ApiError: 400 for a malformed spec.
        """
        spec = review.get("spec")
        if not isinstance(spec, dict | None):
            raise bad_request("spec must be an object")
        answers: dict[str, Callable[[], JsonObject]] = {
            "selfsubjectreviews": lambda: {"userInfo": user.info()},
            "tokenreviews": lambda: self._token(spec or {}),
            "selfsubjectaccessreviews": lambda: self._access(user, spec or {}),
            "subjectaccessreviews": lambda: self._access(_subject(spec or {}), spec or {}),
            "selfsubjectrulesreviews": lambda: self._rules(user, spec or {}),
        }
        return {"metadata": {"creationTimestamp": None}, **review, "status": answers[plural]()}

    def _token(self, spec: JsonObject) -> JsonObject:
        token = spec.get("token")
        user = self._authenticator.identify(token) if isinstance(token, str) else None
        if user is None:
            return {"authenticated": False, "user": {}, "error": "invalid bearer token"}
        return {"authenticated": True, "user": user.info()}

    def _access(self, user: User, spec: JsonObject) -> JsonObject:
        on, path = spec.get("resourceAttributes"), spec.get("nonResourceAttributes")
        if isinstance(on, dict):
            words = ("verb", "group", "resource", "subresource", "namespace", "name")
            verb, group, plural, subresource, namespace, name = (str(on.get(word) or "") for word in words)
            attempt = Attempt(verb, group, plural, subresource, namespace, name)
        elif isinstance(path, dict):
            attempt = Attempt(str(path.get("verb") or ""), path=str(path.get("path") or ""))
        else:
            raise bad_request("spec must have resourceAttributes or nonResourceAttributes")
        return {"allowed": self._authorizer.allows(user, attempt)}

    def _rules(self, user: User, spec: JsonObject) -> JsonObject:
        rules = list(self._authorizer.rules(user, str(spec.get("namespace") or "")))
        if ADMINS in user.groups:
            rules.append({"apiGroups": ["*"], "resources": ["*"], "verbs": ["*"]})
        return {
            "resourceRules": [r for r in rules if r.get("resources")],
            "nonResourceRules": [r for r in rules if r.get("nonResourceURLs")],
            "incomplete": False,
        }


def _subject(spec: JsonObject) -> User:
    groups = spec.get("groups") or ()
    return User(str(spec.get("user") or ""), tuple(str(g) for g in groups), str(spec.get("uid") or ""))


def token_request(authenticator: Authenticator, account: JsonObject, request: JsonObject) -> JsonObject:
    """The answer to a TokenRequest for a service account.

    Raises:
        ApiError: 400 for a malformed spec.
    """
    spec = request.get("spec") or {}
    seconds, audiences = spec.get("expirationSeconds"), spec.get("audiences") or []
    if not isinstance(seconds, int | None) or not isinstance(audiences, list):
        raise bad_request("spec.expirationSeconds must be a number and spec.audiences a list")
    token, expiry = authenticator.issue(account, seconds, audiences)
    moment = datetime.datetime.fromtimestamp(expiry, datetime.UTC)
    return {**request, "status": {"token": token, "expirationTimestamp": rfc3339(moment)}}
