"""Jobs that are built with Kustomize, and the objects of Argo CD and Flux around them."""

from __future__ import annotations

import shutil
import subprocess
from typing import Any

import pytest
import yaml

from meshwright.api.labels import KIND
from meshwright.api.parsing import parse_spec
from meshwright.rules.validation import check_spec
from tests import definition
from tests.conflicts import ROOT
from tests.gitops.test_health import EXAMPLES, documents

REFERENCES = {
    "claimName": "PersistentVolumeClaim",
    "configMapName": "ConfigMap",
    "scripts": "ConfigMap",
    "secretName": "Secret",
    "serviceAccountName": "ServiceAccount",
    "resourceClaimName": "ResourceClaim",
    "resourceClaimTemplateName": "ResourceClaimTemplate",
}
NAMED = {"secretKeyRef": "Secret", "configMapKeyRef": "ConfigMap", "imagePullSecrets": "Secret"}


def build(overlay: str) -> list[Any]:
    if shutil.which("kubectl") is None:
        pytest.skip("needs kubectl, for `kubectl kustomize`")
    argv = ["kubectl", "kustomize", str(EXAMPLES / "jobs" / "overlays" / overlay)]
    output = subprocess.run(argv, check=True, capture_output=True, text=True).stdout
    return list(yaml.safe_load_all(output))


def one(objects: list[Any], kind: str) -> Any:
    (found,) = (obj for obj in objects if obj["kind"] == kind)
    return found


def references(schema: Any, path: tuple[str, ...] = ()) -> set[tuple[str, str]]:
    """Every field of the schema that names another object: (kind, path)."""
    found: set[tuple[str, str]] = set()
    for name, field in (schema.get("properties") or {}).items():
        here = (*path, name)
        if name in REFERENCES:
            found.add((REFERENCES[name], "/".join(here)))
        elif name in NAMED:
            found.add((NAMED[name], "/".join((*here, "name"))))
        else:
            found |= references(field.get("items") or field, here)
    return found


def test_kustomize_knows_every_field_that_names_an_object() -> None:
    (config,) = documents(EXAMPLES / "jobs" / "base" / "references.yaml")
    known = {(entry["kind"], field["path"]) for entry in config["nameReference"] for field in entry["fieldSpecs"]}
    schema = definition.committed()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    assert known == references({"properties": {"spec": schema["properties"]["spec"]}})
    assert {field["path"] for field in config["images"]} == {"spec/workers/image"}


@pytest.mark.parametrize("overlay", ["small", "production"])
def test_what_is_built_is_a_valid_job(overlay: str) -> None:
    job = one(build(overlay), KIND)
    spec = parse_spec(job)
    assert check_spec(spec) == []
    assert spec.elastic is not None
    assert "replicas" not in job["spec"], "autoscalers and people own it"


def test_a_suffix_reaches_the_claim_that_the_job_names() -> None:
    objects = build("small")
    claim, job = one(objects, "PersistentVolumeClaim"), one(objects, KIND)
    assert job["spec"]["checkpoint"]["claimName"] == claim["metadata"]["name"] == "checkpoints-small"
    assert job["spec"]["data"]["claimName"] == "corpus", "this claim is not part of the build"


def test_a_new_tag_reaches_the_image_of_the_job() -> None:
    assert one(build("production"), KIND)["spec"]["workers"]["image"].endswith(":1.5.0")


def test_deletion_has_to_be_confirmed_and_checkpoints_are_never_deleted() -> None:
    objects = build("production")
    options = "argocd.argoproj.io/sync-options"
    assert one(objects, KIND)["metadata"]["annotations"][options] == "Prune=confirm,Delete=confirm"
    claim = one(objects, "PersistentVolumeClaim")["metadata"]["annotations"]
    assert claim[options] == "Prune=false,Delete=false"
    assert claim["kustomize.toolkit.fluxcd.io/prune"] == "disabled"


def test_argo_cd_does_not_reset_what_others_own_and_installs_the_operator_first() -> None:
    operator, jobs = documents(EXAMPLES / "argocd" / "applications.yaml")
    (ignored,) = jobs["spec"]["ignoreDifferences"]
    assert (ignored["group"], ignored["kind"]) == ("meshwright.dev", KIND)
    assert "/spec/replicas" in ignored["jsonPointers"]
    assert "RespectIgnoreDifferences=true" in jobs["spec"]["syncPolicy"]["syncOptions"]
    waves = [int(app["metadata"]["annotations"]["argocd.argoproj.io/sync-wave"]) for app in (operator, jobs)]
    assert waves[0] < waves[1]


def test_paths_of_the_chart_and_the_overlays_exist() -> None:
    operator, jobs = documents(EXAMPLES / "argocd" / "applications.yaml")
    assert (ROOT / operator["spec"]["source"]["path"] / "Chart.yaml").is_file()
    for path in [jobs["spec"]["source"]["path"]] + [
        obj["spec"]["path"].removeprefix("./")
        for obj in documents(EXAMPLES / "flux" / "jobs.yaml")
        if obj["kind"] == "Kustomization"
    ]:
        assert (EXAMPLES / "jobs" / path / "kustomization.yaml").is_file()
    (release,) = (obj for obj in documents(EXAMPLES / "flux" / "operator.yaml") if obj["kind"] == "HelmRelease")
    assert (ROOT / release["spec"]["chart"]["spec"]["chart"] / "Chart.yaml").is_file()
