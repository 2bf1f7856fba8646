"""Who asks: bearer tokens into users, service account tokens, and impersonation.

Service account tokens are JWTs in form, signed with a key that only this server knows, so that they can be given to
processes and checked again without storing them.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import orjson

from meshwright.local.apiserver.errors import unauthorized

ADMINS = "system:masters"
AUTHENTICATED = "system:authenticated"
ANONYMOUS = "system:anonymous"
UNAUTHENTICATED = "system:unauthenticated"
SERVICE_ACCOUNT = "system:serviceaccount:"
ISSUER = "https://kubernetes.default.svc"
_MIN_SECONDS, _DEFAULT_SECONDS = 600, 3600


@dataclass(frozen=True, slots=True)
class User:
    """An authenticated user, or the anonymous one."""

    name: str
    groups: tuple[str, ...] = ()
    uid: str = ""

    @property
    def anonymous(self) -> bool:
        """Whether nobody vouched for this user."""
        return self.name == ANONYMOUS

    def info(self) -> dict[str, Any]:
        """The `userInfo` of reviews."""
        info: dict[str, Any] = {"username": self.name, "groups": list(self.groups)}
        return {**info, "uid": self.uid} if self.uid else info


NOBODY = User(ANONYMOUS, (UNAUTHENTICATED,))


def admin() -> User:
    """The user that may do everything."""
    return User("kubernetes-admin", (ADMINS, AUTHENTICATED))


class Authenticator:
    """Tokens and the users behind them.

    Args:
        tokens: static tokens.
        key: signs service account tokens; a new one makes all earlier tokens worthless.
        account_exists: asked with namespace, name and uid whether a service account still stands.
    """

    def __init__(self, tokens: Mapping[str, User], key: bytes, account_exists: Callable[[str, str, str], bool]) -> None:
        self._tokens = {hashlib.sha256(token.encode()).digest(): user for token, user in tokens.items()}
        self._key = key
        self._account_exists = account_exists

    def authenticate(self, authorization: str) -> User:
        """The user behind an Authorization header; the anonymous one without any.

        Raises:
            ApiError: 401 for a token that is unknown, expired or of a service account that is gone.
        """
        if not authorization:
            return NOBODY
        scheme, _, token = authorization.partition(" ")
        user = self.identify(token.strip()) if scheme.lower() == "bearer" else None
        if user is None:
            raise unauthorized()
        return user

    def identify(self, token: str) -> User | None:
        """The user behind a token; None when it is worth nothing. Static tokens are compared by their hash."""
        user = self._tokens.get(hashlib.sha256(token.encode()).digest())
        return user or self._service_account(token)

    def issue(self, account: Mapping[str, Any], seconds: int | None, audiences: list[str]) -> tuple[str, int]:
        """A token for a service account object, and when it expires in seconds since 1970."""
        now = int(time.time())
        expiry = now + max(_MIN_SECONDS, seconds or _DEFAULT_SECONDS)
        metadata = account["metadata"]
        claims = {
            "iss": ISSUER,
            "aud": audiences or [ISSUER],
            "sub": f"{SERVICE_ACCOUNT}{metadata['namespace']}:{metadata['name']}",
            "iat": now,
            "nbf": now,
            "exp": expiry,
            "jti": secrets.token_hex(16),
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
        account = claims["kubernetes.io"]["serviceaccount"]
        namespace = claims["kubernetes.io"]["namespace"]
        if claims["exp"] < time.time() or ISSUER not in claims["aud"]:
            return None
        if not self._account_exists(namespace, account["name"], account["uid"]):
            return None
        groups = ("system:serviceaccounts", f"system:serviceaccounts:{namespace}", AUTHENTICATED)
        return User(claims["sub"], groups, account["uid"])


def impersonated(user: str, groups: list[str], uid: str) -> User:
    """The user that an administrator acts as."""
    if user.startswith(SERVICE_ACCOUNT):
        namespace = user.removeprefix(SERVICE_ACCOUNT).partition(":")[0]
        groups = [*groups, "system:serviceaccounts", f"system:serviceaccounts:{namespace}"]
    added = UNAUTHENTICATED if user == ANONYMOUS else AUTHENTICATED
    return replace(User(user, uid=uid), groups=tuple(dict.fromkeys([*groups, added])))


def _encode(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def _decode(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
