"""Which connections a server accepts, and which one it closes for a new one.

A client that is not verified costs little: its connections are limited in number and rate, per source address and in
total. If there are too many, the oldest is closed, because an agent verifies its connection within milliseconds. A
verified connection does not count against its source, so that any number of agents may share one address.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Protocol

from meshwright_operator.http.limits import ConnectionLimits, TokenBucket

MAX_SOURCES = 16_384
"""Source addresses of which the rate is remembered."""


class Peer(Protocol):
    """A connection, as admission sees it."""

    source: str

    def close(self, reason: str) -> None:
        """Close the connection, and remove it from admission."""


class _Source:
    """A source address."""

    __slots__ = ("bucket", "trusted", "unverified")

    def __init__(self, bucket: TokenBucket) -> None:
        self.bucket = bucket
        self.trusted = False
        """Whether it has verified a connection."""
        self.unverified: dict[Peer, None] = {}


class Admission:
    """The connections of one server. `clock` returns monotonic seconds."""

    def __init__(self, limits: ConnectionLimits, clock: Callable[[], float]) -> None:
        self.limits = limits
        self._clock = clock
        self._bucket = TokenBucket(limits.rate, limits.burst, clock())
        self._sources: OrderedDict[str, _Source] = OrderedDict()
        self._unverified: dict[Peer, None] = {}
        self._owners: dict[Hashable, dict[Peer, None]] = {}
        self._owner_of: dict[Peer, Hashable] = {}

    def __len__(self) -> int:
        """The number of open connections."""
        return len(self._unverified) + len(self._owner_of)

    @property
    def unverified(self) -> int:
        """The number of open connections that are not verified."""
        return len(self._unverified)

    def refusal(self, address: str) -> str:
        """Why a new connection from this address is refused; empty if it is accepted. Closes an older one for it."""
        now = self._clock()
        source = self._source(address, now)
        if source.bucket.take(now) > 0:
            return "source_rate"
        if not source.trusted and self._bucket.take(now) > 0:
            return "rate"
        if len(self) >= self.limits.total and not self._unverified:
            return "total"
        if len(source.unverified) >= self.limits.unverified_per_source:
            next(iter(source.unverified)).close("evicted")
        elif self._unverified and (len(self._unverified) >= self.limits.unverified or len(self) >= self.limits.total):
            next(iter(self._unverified)).close("evicted")
        return ""

    def add(self, peer: Peer) -> None:
        """Count a connection that was accepted."""
        self._unverified[peer] = None
        self._source(peer.source, self._clock()).unverified[peer] = None

    def verify(self, peer: Peer, owner: Hashable) -> None:
        """A request on the connection had a valid signature of this owner."""
        if (known := self._owner_of.get(peer)) == owner:
            return
        if known is not None:
            self._leave(peer, known)
        elif peer in self._unverified:
            del self._unverified[peer]
            source = self._source(peer.source, self._clock())
            source.unverified.pop(peer, None)
            source.bucket.give_back()
            if not source.trusted:
                self._bucket.give_back()
                source.trusted = True
        else:
            return  # closed meanwhile
        own = self._owners.setdefault(owner, {})
        self._owner_of[peer] = owner
        own[peer] = None
        if len(own) > self.limits.per_owner:
            next(iter(own)).close("owner")

    def remove(self, peer: Peer) -> None:
        """The connection is closed."""
        if peer in self._unverified:
            del self._unverified[peer]
            if (source := self._sources.get(peer.source)) is not None:
                source.unverified.pop(peer, None)
        elif (owner := self._owner_of.get(peer)) is not None:
            self._leave(peer, owner)

    def _leave(self, peer: Peer, owner: Hashable) -> None:
        del self._owner_of[peer]
        own = self._owners[owner]
        own.pop(peer, None)
        if not own:
            del self._owners[owner]

    def _source(self, address: str, now: float) -> _Source:
        source = self._sources.get(address)
        if source is None:
            bucket = TokenBucket(self.limits.rate_per_source, self.limits.burst_per_source, now)
            source = self._sources[address] = _Source(bucket)
            if len(self._sources) > MAX_SOURCES:
                self._forget_one(now)
        self._sources.move_to_end(address)
        return source

    def _forget_one(self, now: float) -> None:
        """Forget the source that was idle longest, unless it still has unverified connections."""
        address, source = next(iter(self._sources.items()))
        if source.unverified and not source.bucket.is_full(now):
            self._sources.move_to_end(address)
            address = next(iter(self._sources))
        del self._sources[address]
