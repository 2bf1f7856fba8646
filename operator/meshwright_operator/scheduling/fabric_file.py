"""The fabric of the site as a file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from meshwright.planner.topology.site import FabricError, SiteFabric, parse_fabric
from meshwright_operator.metrics.operator_metrics import OperatorMetrics
from meshwright_operator.scheduling.document_file import DocumentFile


class FabricFile(DocumentFile[SiteFabric]):
    """Reads the fabric, and passes on each valid version of it. Without a path nothing is stated."""

    def __init__(self, path: Path | None, metrics: OperatorMetrics, apply: Callable[[SiteFabric], None]) -> None:
        super().__init__(path, "fabric", parse_fabric, apply, metrics.fabric_valid, FabricError)
