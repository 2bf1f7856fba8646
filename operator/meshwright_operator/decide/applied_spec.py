"""The applied spec: the spec from which the plan, the pods and the ranks were created, stored in status.

`spec` is what the user requests now. If it is invalid or does not fit yet, the operator must still replace lost pods.
It takes the new pods' manifests and the ranks' run configuration from the applied spec, so that the gang stays uniform.

The applied spec is stored with every default that was in effect, and with the scheme of its revision
(`meshwright.rules.revision`). Workers keep both until an edit restarts them, also across upgrades of the operator whose
defaults differ.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from pydantic import ValidationError

from meshwright.api.labels import API_VERSION
from meshwright.api.parsing import InvalidSpecError, parse_known_fields
from meshwright.api.spec import ParallelTrainingJobSpec
from meshwright.api.status import MAX_APPLIED_SPEC, ParallelTrainingJobStatus
from meshwright.rules.edits import LIVE, NEXT_START
from meshwright.rules.revision import (
    Fields,
    field_at,
    restarting_fields,
    revision_of_fields,
    scheme_of,
    set_field,
    with_defaults,
    without_defaults,
    without_later_defaults,
)
from meshwright.rules.spec_defaults import DEFAULTS, ELASTIC_SCHEME, SCHEME
from meshwright_operator.decide.observed import has_started


@dataclass(frozen=True, slots=True)
class RunningSpec:
    """The spec that a started job runs."""

    spec: ParallelTrainingJobSpec
    revision: str
    """Its revision, of the scheme with which its workers started."""
    fields: Mapping[str, Any]
    """The spec as JSON, with the defaults of its scheme. A later version may have stored fields that `spec` lacks."""
    answers: dict[str, tuple[object, Any]] = field(default_factory=dict, repr=False, compare=False)
    """Question -> what it was last asked about, and the answer: nearly every reconcile asks about the same."""

    @property
    def scheme(self) -> int:
        """The scheme to compare with: that of the revision, unless a later version defined it."""
        return _known_scheme(self.revision)

    def runs(self, requested: Mapping[str, Any]) -> bool:
        """Whether the workers run the spec of the object already, so that no restart is needed."""
        known = self.answers.get("runs")
        if known is None or known[0] != requested:
            known = self.answers["runs"] = requested, self._compare(requested)
        return bool(known[1])

    def _compare(self, requested: Mapping[str, Any]) -> bool:
        same = without_later_defaults(requested, self.fields)
        running = self.fields if scheme_of(self.revision) in DEFAULTS else self.spec.wire()
        return restarting_fields(same, self.scheme) == restarting_fields(running, self.scheme)


def revision_of(spec: ParallelTrainingJobSpec, scheme: int = SCHEME) -> str:
    """The hash of the parts of the spec that need a restart of the workers when they change, with its scheme."""
    return revision_of_fields(spec.wire(), scheme)


def encode_spec(spec: ParallelTrainingJobSpec, scheme: int = SCHEME) -> str:
    """The spec as JSON with its API version, its scheme and all defaults.

    A spec that is too large for status is stored without the defaults of the scheme. If that is too large as well, this
    is empty, and there is no applied spec.
    """
    fields = with_defaults(spec.wire(), scheme)
    for form in (fields, without_defaults(fields, scheme)):
        text = _envelope(scheme, form)
        if len(text) <= MAX_APPLIED_SPEC:
            return text
    return ""


def running_spec(status: ParallelTrainingJobStatus) -> RunningSpec | None:
    """The spec that a started job runs. None before it starts, and if status does not contain it or is damaged."""
    if status.plan is None or not status.applied_spec or not has_started(status):
        return None
    return _decode(status.applied_spec, status.plan.revision)


def updated_applied_spec(status: ParallelTrainingJobStatus, spec: ParallelTrainingJobSpec, revision: str) -> str:
    """The applied spec to store, now that the job has `spec`.

    While the revision stays, only the fields that restart no worker change. What a later version stored is not touched.
    """
    running = _decode(status.applied_spec, revision) if status.applied_spec else None
    if running is None:
        return encode_spec(spec, _known_scheme(revision))
    known = running.answers.get("updated")
    if known is None or known[0] != (status.applied_spec, spec):
        known = running.answers["updated"] = (status.applied_spec, spec), _updated(status.applied_spec, spec, revision)
    return str(known[1])


def _updated(applied_spec: str, spec: ParallelTrainingJobSpec, revision: str) -> str:
    """The applied spec with the values that `spec` has of the fields that restart no worker."""
    stored, wire = json.loads(applied_spec), spec.wire()
    before = json.dumps(stored)
    for path in _without_restart(stored, wire):
        before_edit, value = field_at(stored["spec"], path), field_at(wire, path)
        if (
            before_edit is None
            and path not in DEFAULTS[_known_scheme(revision)]
            and value == DEFAULTS[SCHEME].get(path)
        ):
            continue  # a later version added the field, and nobody has set it
        if before_edit != value:
            set_field(stored["spec"], path, value)
    if json.dumps(stored) == before:
        return applied_spec
    text = _envelope(stored["scheme"], stored["spec"])
    return text if len(text) <= MAX_APPLIED_SPEC else applied_spec


def _without_restart(stored: Mapping[str, Any], wire: Mapping[str, Any]) -> tuple[str, ...]:
    """The fields that restart no worker. The replicas of an elastic job are one of them."""
    elastic = all(field_at(fields, "elastic") is not None for fields in (stored["spec"], wire))
    resizable = elastic and stored["scheme"] >= ELASTIC_SCHEME
    return (*LIVE, *NEXT_START, "replicas") if resizable else (*LIVE, *NEXT_START)


def spec_at_start(
    requested: Mapping[str, Any], status: ParallelTrainingJobStatus, spec: ParallelTrainingJobSpec
) -> tuple[ParallelTrainingJobSpec, str]:
    """The spec and the revision of a job without an applied spec.

    If its workers were started with the same spec by another version, they keep that version's defaults and revision.

    Args:
        requested: The spec of the object, as JSON.
        status: The job's status.
        spec: `requested`, with today's defaults.
    """
    revision = status.plan.revision if status.plan is not None and has_started(status) else ""
    scheme = scheme_of(revision)
    if scheme is not None and scheme not in DEFAULTS:
        return spec, revision  # A later version started the workers: this one cannot compute the revision.
    for fields in (requested, without_later_defaults(requested, {})) if scheme is not None else ():
        if revision_of_fields(fields, scheme or SCHEME) == revision:
            try:
                return parse_known_fields(ParallelTrainingJobSpec, with_defaults(fields, scheme or SCHEME)), revision
            except InvalidSpecError:
                break
    return spec, revision_of(spec)


def _known_scheme(revision: str) -> int:
    """The scheme of a revision, or the newest one if this version does not know it."""
    scheme = scheme_of(revision)
    return scheme if scheme is not None and scheme in DEFAULTS else SCHEME


def _envelope(scheme: int, fields: Mapping[str, Any]) -> str:
    document = {"apiVersion": API_VERSION, "scheme": scheme, "spec": fields}
    return json.dumps(document, sort_keys=True, ensure_ascii=False, separators=(",", ":"))


@lru_cache(maxsize=1024)
def _decode(text: str, revision: str) -> RunningSpec | None:
    """The applied spec in `text`, if it is that of the revision. Cached, because each reconcile needs it."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(document, dict) or document.get("apiVersion") != API_VERSION:
        return None
    fields, scheme = document.get("spec"), document.get("scheme")
    if not isinstance(fields, dict) or type(scheme) is not int or scheme != scheme_of(revision):
        return None
    try:
        filled: Fields = with_defaults(fields, scheme) if scheme in DEFAULTS else fields
        spec = parse_known_fields(ParallelTrainingJobSpec, filled)
    except (ValidationError, ValueError, TypeError):
        return None
    if scheme in DEFAULTS and revision_of_fields(fields, scheme) != revision:
        return None
    return RunningSpec(spec, revision, filled)
