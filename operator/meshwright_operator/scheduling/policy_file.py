"""The administrator's policy as a file, which is read again when it changes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from meshwright_operator.documents import DocumentFile
from meshwright_operator.metrics.operator_metrics import OperatorMetrics
from meshwright_operator.scheduling.policy import Policy, parse_policy


class PolicyFile(DocumentFile[Policy]):
    """Reads the policy, and passes on each valid version of it. Without a path there are no bounds."""

    def __init__(self, path: Path | None, metrics: OperatorMetrics, apply: Callable[[Policy], None]) -> None:
        super().__init__(path, "policy", parse_policy, apply, metrics.valid_document("policy"))
