"""The committed CRD, read once by each test process. PyYAML's own reader takes seconds for it, libyaml's tenths."""

from __future__ import annotations

from functools import cache

import yaml

from meshwright.api.objects import KubeObject
from tests.conflicts import ROOT

FILE = ROOT / "crds" / "meshwright.dev_paralleltrainingjobs.yaml"


@cache
def committed() -> KubeObject:
    """The content of the file. Whoever changes it copies it first."""
    found: KubeObject = yaml.load(FILE.read_text(encoding="utf-8"), yaml.CSafeLoader)
    return found
