"""Which certificates of the coordinator this agent accepts: those of its CA bundle, and no other.

The pod's environment contains the bundle at the pod's creation. The agent replaces it whenever the coordinator has a
new one (`CoordinatorClient.renew_trust`).
"""

from __future__ import annotations

import ssl

from meshwright.protocol.trust import bundle_id


class BundleError(ValueError):
    """A CA bundle cannot be read."""


class CoordinatorTrust:
    """The CA bundle in use. Without one, an agent uses plain HTTP, or the system's CAs for an https URL.

    Raises:
        BundleError: The bundle cannot be read.
    """

    def __init__(self, bundle: str) -> None:
        self._bundle_id = bundle_id(bundle)
        self._context = client_context(bundle) if bundle else None

    @property
    def pinned(self) -> bool:
        """Whether there is a bundle."""
        return self._context is not None

    @property
    def context(self) -> ssl.SSLContext | bool:
        """What `aiohttp` verifies with."""
        return self._context if self._context is not None else True

    def differs(self, name: str | None) -> bool:
        """Whether the coordinator's bundle, of this name, is another one. Without a name it has none."""
        return self.pinned and bool(name) and name != self._bundle_id

    def replace(self, bundle: str) -> bool:
        """Use another bundle from now on. Return whether it differs from the previous one.

        Raises:
            BundleError: It cannot be read. The previous one stays in use.
        """
        if not self.differs(bundle_id(bundle)):
            return False
        self._context = client_context(bundle)
        self._bundle_id = bundle_id(bundle)
        return True


def client_context(bundle: str) -> ssl.SSLContext:
    """A context that trusts only the CAs of this bundle, and verifies the server's name.

    Raises:
        BundleError: The bundle cannot be read.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    try:
        context.load_verify_locations(cadata=bundle)
    except (ssl.SSLError, ValueError) as error:
        raise BundleError(f"not CA certificates in PEM format: {error}") from None
    return context


def unverified_context() -> ssl.SSLContext:
    """A context that accepts every server, only for the request of a new bundle, whose response is signed."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context
