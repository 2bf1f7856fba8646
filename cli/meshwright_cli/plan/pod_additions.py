"""What a job's pods have beyond their own fields, without a cluster: of the administrator's profile and of claims.

Profiles are those of `--profiles`. Claims, templates, device classes and ResourceSlices are those of the manifest and
of the inventory. The operator counts the same with the same functions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import click
import yaml

from meshwright.administrator import document_in_values
from meshwright.api.objects import KubeObject
from meshwright.api.spec import ParallelTrainingJobSpec
from meshwright.devices.amounts import amounts_by_node, with_amounts
from meshwright.devices.claims import CHANNEL_CLASS, AllocatedClaim, Wanted, read_claim
from meshwright.devices.job_claims import CLAIMS, KINDS, TEMPLATES, named_claims, wanted_of, with_claims
from meshwright.devices.selectors import selectors_of
from meshwright.devices.slices import MALFORMED, devices_by_node
from meshwright.planner.cluster.inventory import Inventory
from meshwright.planner.cluster.pod_resources import claimed_devices, is_terminal
from meshwright.planner.plan import Plan
from meshwright.profiles.document import Profiles, ProfilesError, parse_profiles
from meshwright.profiles.merged import conflict, with_extra_request, with_profile
from meshwright.profiles.profile import Profile
from meshwright_cli.parameters import input_text

RESOURCES = {kind: resource for resource, kind in KINDS.items()}
READ = ("ResourceSlice", "DeviceClass", *RESOURCES)
"""Kinds of the objects that are read."""
LISTED = "resourceslices,deviceclasses,resourceclaims,resourceclaimtemplates"


@dataclass(frozen=True, slots=True)
class PodAdditions:
    """What the profile and the claims of one job add to its pods and to what nodes offer."""

    profile: Profile | None = None
    claims: dict[tuple[str, str], Counter[Wanted]] = field(default_factory=dict)
    """Resource and name -> what a claim or template of the job's namespace requests."""
    allocated: frozenset[str] = frozenset()
    """Claims that have devices already, and take no others."""
    slices: tuple[KubeObject, ...] = ()
    classes: dict[str, tuple[tuple[str, ...], str]] = field(default_factory=dict)
    """Device class -> its selectors, and the extended resource that it stands for, if any."""
    others: tuple[AllocatedClaim, ...] = ()
    """All claims that have devices."""
    notes: tuple[str, ...] = ()
    """What is not counted, and why."""

    def spec_of(self, spec: ParallelTrainingJobSpec) -> ParallelTrainingJobSpec:
        """The spec as the operator plans it."""
        spec = with_claims(spec, lambda resource, name: self.claims.get((resource, name)))
        return spec if self.profile is None else with_profile(spec, self.profile)

    def extended(self, spec: ParallelTrainingJobSpec, plan: Plan) -> Plan:
        """The plan, whose workers also request what claims and the profile's containers do."""
        return with_extra_request(spec, self.profile, {w.resource: n for w, n in self._wanted(spec).items()}, plan)

    def nodes_of(self, nodes: Sequence[KubeObject], pods: Sequence[KubeObject]) -> Sequence[KubeObject]:
        """The nodes with the devices that ResourceSlices publish."""
        if not self.classes:
            return nodes
        workers = {
            (str(pod["metadata"].get("namespace", "")), str(pod["metadata"]["name"]), str(pod["metadata"].get("uid")))
            for pod in pods
            if claimed_devices(pod) and not is_terminal(pod)
        }
        requested = [wanted for one in self.claims.values() for wanted in one]
        found = amounts_by_node(
            devices_by_node(self.slices), self.classes, self.others, requested, lambda claim: claim.pod in workers
        )
        return [_with_devices(node, found.get(str((node.get("metadata") or {}).get("name")), {})) for node in nodes]

    def explained(self, inventory: Inventory) -> Inventory:
        """The inventory with warnings about what is not counted."""
        return replace(inventory, warnings=(*inventory.warnings, *self.notes))

    def _wanted(self, spec: ParallelTrainingJobSpec) -> Counter[Wanted]:
        """What each pod claims. Empty if the devices of the cluster are not known."""
        found: Counter[Wanted] = Counter()
        if self.classes:
            for _, resource, name in named_claims(spec):
                if resource == TEMPLATES or name not in self.allocated:
                    found += self.claims.get((resource, name), Counter())
            if spec.joins_hosts and CHANNEL_CLASS in self.classes:
                found[Wanted(CHANNEL_CLASS)] += 1
        return found


NO_ADDITIONS = PodAdditions()


def additions_of(job: KubeObject, spec: ParallelTrainingJobSpec, profiles: Path | None, *files: Path) -> PodAdditions:
    """What is added to the job's pods: by a profile of `profiles`, and by claims in these files.

    Raises:
        click.ClickException: a file cannot be read, or the job may not use its profile.
    """
    namespace = str((job.get("metadata") or {}).get("namespace") or "default")
    found = _of_objects(spec, namespace, [item for file in files for item in _items(file)], files)
    name = spec.workers.profile
    if name is None:
        return found
    if profiles is None:
        note = f"`workers.profile` is `{name}`: without --profiles, what it adds to the pods is not counted"
        return replace(found, notes=(*found.notes, note))
    problem, profile = profile_of(spec, name, namespace, read_profiles(profiles))
    if problem:
        raise click.ClickException(problem)
    return replace(found, profile=profile)


def profile_of(
    spec: ParallelTrainingJobSpec, name: str, namespace: str, profiles: Profiles
) -> tuple[str, Profile | None]:
    """Why the job may not use the profile, in the operator's words, or else the profile."""
    profile = profiles.find(name, namespace)
    if isinstance(profile, str):
        return profile, None
    return conflict(spec, name, profile), profile


def read_profiles(path: Path) -> Profiles:
    """The profiles in a file: the document of the chart's value `profiles`, or values that contain it.

    Raises:
        click.ClickException: the file cannot be read, or its document is invalid.
    """
    try:
        return parse_profile_file(path.read_text())
    except OSError as error:
        raise click.ClickException(f"{path}: {error.strerror}") from error
    except (ProfilesError, UnicodeDecodeError) as error:
        raise click.ClickException(f"{path}: {error}") from error


def parse_profile_file(text: str) -> Profiles:
    """The profiles of a document, or of values of the chart.

    Raises:
        ProfilesError: the document is invalid.
    """
    try:
        return parse_profiles(document_in_values(text, "profiles", "a mapping from names to profiles"))
    except ValueError as error:
        raise ProfilesError(str(error)) from None


def _of_objects(
    spec: ParallelTrainingJobSpec, namespace: str, items: Sequence[KubeObject], files: Sequence[Path]
) -> PodAdditions:
    claims: dict[tuple[str, str], Counter[Wanted]] = {}
    classes: dict[str, tuple[tuple[str, ...], str]] = {}
    allocated, others, slices = set(), [], []
    for item in items:
        kind, metadata = item.get("kind"), item.get("metadata") or {}
        try:
            name = str(metadata["name"])
            if kind in RESOURCES and str(metadata.get("namespace") or namespace) == namespace:
                claims[RESOURCES[str(kind)], name] = wanted_of(item, RESOURCES[str(kind)])
                if kind == KINDS[CLAIMS] and (item.get("status") or {}).get("allocation"):
                    allocated.add(name)
            if kind == KINDS[CLAIMS] and (claim := read_claim(item)) is not None:
                others.append(claim)
            elif kind == "DeviceClass":
                inner = item.get("spec") or {}
                classes[name] = selectors_of(inner), str(inner.get("extendedResourceName") or "")
            elif kind == "ResourceSlice":
                slices.append(item)
        except MALFORMED:
            continue
    notes = tuple(_notes(spec, claims, bool(classes), files))
    return PodAdditions(None, claims, frozenset(allocated), tuple(slices), classes, tuple(others), notes)


def _notes(
    spec: ParallelTrainingJobSpec, claims: dict[tuple[str, str], Counter[Wanted]], classes: bool, files: Sequence[Path]
) -> Iterable[str]:
    where = " nor in ".join(str(file) for file in files)
    neither = "neither " if len(files) > 1 else "not "
    named = list(named_claims(spec))
    for path, resource, name in named:
        if (resource, name) not in claims:
            yield (
                f"{KINDS[resource]} `{name}` (`{path}`) is {neither}in {where}: its devices are not counted, and in a "
                "cluster without it the job waits"
            )
    if named and not classes:
        yield (
            "no DeviceClass is known: of claims, only GPUs of `workers.gpuResource` and channels count. Add "
            f"{LISTED} to the inventory"
        )


def _items(file: Path) -> list[KubeObject]:
    """The objects in a file, and in its lists. The file has been read before: what is not an object is left out."""
    try:
        text = input_text(file)
        documents = list(yaml.safe_load_all(text)) if any(kind in text for kind in READ) else []
    except (OSError, yaml.YAMLError, ValueError, RecursionError):
        return []
    found: list[KubeObject] = []
    for document in documents:
        if isinstance(document, dict):
            inner = document.get("items")
            found += [one for one in (inner if isinstance(inner, list) else [document]) if isinstance(one, dict)]
    return found


def _with_devices(node: KubeObject, amounts: dict[str, int]) -> KubeObject:
    status: Any = node.get("status") or {}
    if not amounts or not isinstance(status, dict):
        return node
    return {**node, "status": {**status, "allocatable": with_amounts(status.get("allocatable") or {}, amounts)}}
