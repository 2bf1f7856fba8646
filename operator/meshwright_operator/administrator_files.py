"""The administrator's documents, each as a file that is read again when it changes. Without a path there is none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from meshwright.planner.topology.site import FabricError, SiteFabric, parse_fabric
from meshwright.profiles.document import Profiles, ProfilesError, parse_profiles
from meshwright_operator.documents import DocumentError, DocumentFile
from meshwright_operator.operator_metrics import OperatorMetrics
from meshwright_operator.scheduling.policy import Policy, parse_policy


def policy_file(path: Path | None, metrics: OperatorMetrics, apply: Callable[[Policy], None]) -> DocumentFile[Policy]:
    """The bounds of tenants."""
    return DocumentFile(path, "policy", parse_policy, apply, metrics.valid_document("policy"))


def fabric_file(
    path: Path | None, metrics: OperatorMetrics, apply: Callable[[SiteFabric], None]
) -> DocumentFile[SiteFabric]:
    """The fabric of the site."""
    return DocumentFile(path, "fabric", _parse_fabric, apply, metrics.valid_document("fabric"))


def profiles_file(
    path: Path | None, metrics: OperatorMetrics, apply: Callable[[Profiles], None]
) -> DocumentFile[Profiles]:
    """The profiles of worker pods."""
    return DocumentFile(path, "profiles", _parse_profiles, apply, metrics.valid_document("profiles"))


def _parse_profiles(text: str) -> Profiles:
    try:
        return parse_profiles(text)
    except ProfilesError as error:
        raise DocumentError(str(error)) from None


def _parse_fabric(text: str) -> SiteFabric:
    try:
        return parse_fabric(text)
    except FabricError as error:
        raise DocumentError(str(error)) from None
