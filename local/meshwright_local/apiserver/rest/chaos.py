"""Fault injection, to test clients against the failures of real API servers.

A rule selects requests and has an effect on them. An administrator reads and replaces rules at `/debug/chaos` (GET,
PUT, DELETE); tests in the same process use `ApiServer.chaos`. As JSON a rule is

    {"match": {"verbs": ["create"], "resource": "pods", "count": 3}, "effect": {"type": "delay", "seconds": 2}}

with the effects below. A rule with a count is removed when it is used up, one without stays until it is removed.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.alias_generators import to_camel

from meshwright.api.objects import KubeObject
from meshwright_local.apiserver.auth.identity import RequestAttributes
from meshwright_local.apiserver.rest.list_watch import WatchFault
from meshwright_local.apiserver.status_errors import ApiError, bad_request, qualified

_REASONS = {
    **{403: "Forbidden", 404: "NotFound", 409: "Conflict", 410: "Expired", 422: "Invalid", 429: "TooManyRequests"},
    **{500: "InternalError", 503: "ServiceUnavailable", 504: "Timeout"},
}


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", alias_generator=to_camel, populate_by_name=True)


class Match(_Strict):
    """Selects requests that match every field. A field that is not set matches every request."""

    verbs: list[str] = []
    """As in RBAC: get, list, watch, create, update, patch, delete, deletecollection."""
    resource: str | None = None
    """Plural name, with or without its group: `pods`, `deployments.apps`."""
    namespace: str | None = None
    name: str | None = None
    """Name of the object; on a create, the name in the body."""
    subresource: str | None = None
    """Subresource such as `status`; "" for requests on the object itself."""
    user_agent: str = ""
    """Substring of the User-Agent header."""
    probability: float = Field(1.0, ge=0, le=1)
    count: int | None = Field(None, ge=1)
    """Number of times that the rule takes effect."""


class Answer(_Strict):
    """Return this error and do not execute the request, like a failing server or an admission plugin."""

    type: Literal["answer"]
    code: int = Field(ge=400, le=599)
    reason: str = ""
    """Reason of the Status; by default that of the code."""
    message: str = "injected by a chaos rule"
    retry_after: int | None = Field(None, ge=0)
    """Seconds of the Retry-After header."""


class Delay(_Strict):
    """Execute the request after a delay."""

    type: Literal["delay"]
    seconds: float = Field(ge=0)


class DropWatches(_Strict):
    """Close open watches once, when the rule is added. The rule is not stored."""

    type: Literal["dropWatches"]


class DelayEvents(_Strict):
    """Send events of open and new watches after a delay."""

    type: Literal["delayEvents"]
    seconds: float = Field(ge=0)


class HalfOpen(_Strict):
    """Keep open and new watches connected, but send nothing more: no events, no bookmarks, no end."""

    type: Literal["halfOpen"]


class Stale(_Strict):
    """Return objects as of this many revisions ago to lists and gets, like an API server whose cache lags."""

    type: Literal["stale"]
    revisions: int = Field(ge=1)


class LostAnswer(_Strict):
    """Execute the request, then close the connection without a response."""

    type: Literal["lostAnswer"]


class Rule(_Strict):
    """One rule."""

    match: Match = Match()
    effect: Annotated[
        Answer | Delay | DropWatches | DelayEvents | HalfOpen | Stale | LostAnswer, Field(discriminator="type")
    ]

    def fits(self, attributes: RequestAttributes, user_agent: str) -> bool:
        """Return whether the rule matches a request, before `probability` applies."""
        match = self.match
        wanted = ((match.namespace, attributes.namespace), (match.name, attributes.name))
        return (
            (not match.verbs or attributes.verb in match.verbs)
            and match.resource in (None, attributes.plural, qualified(attributes.group, attributes.plural))
            and match.subresource in (None, attributes.subresource)
            and all(value in (None, given) for value, given in wanted)
            and match.user_agent in user_agent
        )


@dataclass(slots=True)
class FaultOutcome:
    """Effects on one request, other than delay and error."""

    stale_revisions: int = 0
    answer_lost: bool = False


@dataclass(slots=True)
class _OpenWatch:
    attributes: RequestAttributes
    user_agent: str
    watch_fault: WatchFault
    cut: Callable[[], None]


class Chaos:
    """The rules of one server, and the open watches that they affect."""

    def __init__(self) -> None:
        self.rules: list[Rule] = []
        self._watches: list[_OpenWatch] = []

    @property
    def needs_names(self) -> bool:
        """Return whether a rule needs the name of an object that is being created."""
        return any(rule.match.name is not None for rule in self.rules)

    def wire(self) -> list[KubeObject]:
        """Return the rules as JSON, with their remaining counts."""
        return [rule.model_dump(by_alias=True, exclude_defaults=True) for rule in self.rules]

    def replace(self, rules: list[Rule | KubeObject]) -> None:
        """Replace all rules by these, given as rules or JSON objects.

        Raises:
            ApiError: 400 for an invalid rule; the message names the field.
        """
        given = _read(rules)
        self.clear()
        for rule in given:
            self.add(rule)

    def add(self, rule: Rule | KubeObject) -> None:
        """Add a rule. It affects open watches at once. Raises ApiError as `replace`."""
        (new,) = _read([rule])
        if new.effect.type != "dropWatches":
            self.rules.append(new)
        for watch in list(self._watches):
            self._apply_to_watch(new, watch)

    def clear(self) -> None:
        """Remove all rules. Half-open watches stay half-open."""
        self.rules.clear()
        for watch in self._watches:
            watch.watch_fault.delay_seconds = 0.0

    async def apply_rules(self, attributes: RequestAttributes, user_agent: str) -> FaultOutcome:
        """Apply the rules to a request before it is executed; raises the ApiError of a rule."""
        fault_outcome = FaultOutcome()
        for rule in list(self.rules):
            effect = rule.effect
            if isinstance(effect, DelayEvents | HalfOpen) or not self._takes_effect(rule, attributes, user_agent):
                continue
            if isinstance(effect, Delay):
                await asyncio.sleep(effect.seconds)
            elif isinstance(effect, Answer):
                reason = effect.reason or _REASONS.get(effect.code, "Unknown")
                raise ApiError(effect.code, reason, effect.message, retry_after=effect.retry_after)
            elif isinstance(effect, Stale):
                fault_outcome.stale_revisions = effect.revisions
            elif isinstance(effect, LostAnswer):
                fault_outcome.answer_lost = True
        return fault_outcome

    @contextmanager
    def watching(
        self, attributes: RequestAttributes, user_agent: str, watch_fault: WatchFault, cut: Callable[[], None]
    ) -> Iterator[None]:
        """Apply the rules to a watch while it is open; `cut` closes its connection."""
        watch = _OpenWatch(attributes, user_agent, watch_fault, cut)
        self._watches.append(watch)
        try:
            for rule in list(self.rules):
                self._apply_to_watch(rule, watch)
            yield
        finally:
            self._watches.remove(watch)

    def _apply_to_watch(self, rule: Rule, watch: _OpenWatch) -> None:
        effect = rule.effect
        acts = isinstance(effect, DropWatches | DelayEvents | HalfOpen)
        if not acts or not self._takes_effect(rule, watch.attributes, watch.user_agent):
            return
        if isinstance(effect, DropWatches):
            watch.cut()
        elif isinstance(effect, DelayEvents):
            watch.watch_fault.delay_seconds = effect.seconds
        elif isinstance(effect, HalfOpen):
            watch.watch_fault.silent = True

    def _takes_effect(self, rule: Rule, attributes: RequestAttributes, user_agent: str) -> bool:
        """Return whether the rule takes effect now. Decrement its count if it does."""
        match = rule.match
        spent = match.count is not None and match.count < 1
        if spent or not rule.fits(attributes, user_agent) or random.random() >= match.probability:  # noqa: S311
            return False
        if match.count is not None:
            match.count -= 1
            if match.count < 1 and rule in self.rules:
                self.rules.remove(rule)
        return True


def _read(rules: Any) -> list[Rule]:
    if not isinstance(rules, list):
        raise bad_request("chaos rules are a list of objects with `match` and `effect`")
    try:
        return TypeAdapter(list[Rule]).validate_python(rules)
    except ValidationError as error:
        problems = [f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()]
        raise bad_request(f"chaos rule {'; '.join(problems)}") from None
