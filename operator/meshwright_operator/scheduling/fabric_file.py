"""The fabric of the site as a file, which is read again when it changes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from meshwright.planner.topology.site import FabricError, SiteFabric, parse_fabric
from meshwright_operator.documents import DocumentError, DocumentFile
from meshwright_operator.metrics.operator_metrics import OperatorMetrics


class FabricFile(DocumentFile[SiteFabric]):
    """Reads the fabric, and passes on each valid version of it. Without a path nothing is stated."""

    def __init__(self, path: Path | None, metrics: OperatorMetrics, apply: Callable[[SiteFabric], None]) -> None:
        super().__init__(path, "fabric", _parse, apply, metrics.valid_document("fabric"))


def _parse(text: str) -> SiteFabric:
    try:
        return parse_fabric(text)
    except FabricError as error:
        raise DocumentError(str(error)) from None
