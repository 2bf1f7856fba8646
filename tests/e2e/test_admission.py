"""Bad input is refused at apply, with the field named; every example is accepted."""

import json

import pytest

from meshwright.api.labels import KIND
from meshwright.cli import manifest
from meshwright.cli.manifest import ManifestError
from meshwright.local.client import APPLY_PATCH
from tests.e2e.stage import EXAMPLES, NAMESPACE, tiny

BAD = {
    "unknown field": ({"training": {"stepz": 3}}, "stepz"),
    "wrong type": ({"training": {"steps": "many"}}, "steps"),
    "below its bound": ({"training": {"steps": 0}}, "steps"),
    "not in the list": ({"training": {"precision": "fp7"}}, "precision"),
    "missing": ({"workers": {"image": None}}, "image"),
    "heads do not divide": ({"parallelism": {"tensor": 4}, "workers": {"gpusPerWorker": 4}}, "heads"),
    "batch does not divide": ({"training": {"globalBatchSize": 9}}, "globalBatchSize"),
    "more stages than layers": ({"parallelism": {"pipeline": 4}}, "layers"),
    "vocabulary too small": ({"model": {"vocabSize": 100}}, "vocabSize"),
    "command and model": ({"runtime": {"command": ["true"]}}, "command"),
    "preset and numbers": ({"model": {"preset": "llama-3-8b"}}, "preset"),
    "reserved variable": ({"workers": {"env": [{"name": "MESHWRIGHT_TOKEN", "value": "x"}]}}, "MESHWRIGHT_"),
}


@pytest.mark.parametrize("case", BAD)
async def test_bad_input_names_the_field(stage, case):
    change, word = BAD[case]
    with pytest.raises(ManifestError) as refusal:
        await stage.apply(tiny("bad", **change)[1:])
    assert word in str(refusal.value), refusal.value


async def test_a_name_too_long_for_pods_is_refused(stage):
    with pytest.raises(ManifestError, match="43"):
        await stage.apply(tiny("n" * 44)[1:])


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.name)
async def test_every_example_is_accepted(stage, path):
    for item in manifest.read(path):
        resource = await manifest.resource_of(stage.client, item)
        url = resource.path(NAMESPACE, item["metadata"]["name"])
        params = {"fieldManager": "test", "fieldValidation": "Strict", "dryRun": "All"}
        answer = await stage.client.request("PATCH", url, params=params, body=item, content_type=APPLY_PATCH)
        if item["kind"] == KIND:
            assert json.dumps(answer["status"]) == '{"observedGeneration": -1}'
