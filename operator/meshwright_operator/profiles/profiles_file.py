"""The administrator's profiles as a file, which is read again when it changes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from meshwright_operator.documents import DocumentFile
from meshwright_operator.metrics.operator_metrics import OperatorMetrics
from meshwright_operator.profiles.document import Profiles, parse_profiles


class ProfilesFile(DocumentFile[Profiles]):
    """Reads the profiles, and passes on each valid version of them. Without a path there are none."""

    def __init__(self, path: Path | None, metrics: OperatorMetrics, apply: Callable[[Profiles], None]) -> None:
        super().__init__(path, "profiles", parse_profiles, apply, metrics.valid_document("profiles"))
