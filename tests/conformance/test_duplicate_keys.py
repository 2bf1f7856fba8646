"""Keys that a body has twice: an error, a warning or nothing, by `fieldValidation`."""

import json

import pytest

from tests.conformance.conftest import APPLY, JSON_PATCH, MERGE, STRATEGIC

JSON, YAML = "application/json", "application/yaml"


async def send(api, method, path, body, kind=JSON, **query):
    """A request with a body as it is; the code, the answer, and the texts of its warnings."""
    async with api.session.request(
        method,
        api.server.url + path,
        data=body,
        headers={"Content-Type": kind, "Accept": JSON},
        params=query,
        ssl=api.context,
    ) as response:
        said = response.headers.getall("Warning", [])
        texts = [text.removeprefix('299 - "').removesuffix('"').replace('\\"', '"') for text in said]
        return response.status, json.loads(await response.text()), texts


MAP = (
    '{"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "c", "name": "c"}, '
    '"data": {"a": "1", "a": "2", "b": "x"}, "dat": 1, "data": {"c": "d \\" e"}}'
)
IN_MAP = [
    'duplicate field "metadata.name"',
    'duplicate field "data.a"',
    'unknown field "dat"',
    'duplicate field "data"',
]


async def test_a_built_in_object(api):
    code, status, _ = await send(api, "POST", api.maps, MAP, fieldValidation="Strict")
    why = f"strict decoding error: {', '.join(IN_MAP)}"
    assert (code, status["message"]) == (400, f'ConfigMap in version "v1" cannot be handled as a ConfigMap: {why}')
    code, answer, texts = await send(api, "POST", api.maps, MAP, fieldValidation="Warn", dryRun="All")
    assert (code, texts) == (201, IN_MAP)
    # Both objects are read into the same map.
    assert answer["data"] == {"a": "2", "b": "x", "c": 'd " e'}
    assert (await send(api, "POST", api.maps, MAP, dryRun="All"))[2] == IN_MAP
    code, _, texts = await send(api, "POST", api.maps, MAP, fieldValidation="Ignore")
    assert (code, texts) == (201, [])
    assert (await send(api, "PUT", f"{api.maps}/c", MAP))[2] == IN_MAP


async def test_in_lists(api):
    pod = (
        '{"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"}, "spec": {"containers": '
        '[{"name": "a", "image": "b"}, '
        '{"name": "c", "image": "x", "image": "y", "env": [{"name": "A", "name": "B"}]}]}}'
    )
    code, answer, texts = await send(api, "POST", api.pods, pod)
    fields = ("spec.containers[1].image", "spec.containers[1].env[0].name")
    assert (code, texts) == (201, [f'duplicate field "{field}"' for field in fields])
    assert answer["spec"]["containers"][1]["image"] == "y"


async def test_a_custom_resource(api, runs):
    group = runs.split("/")[2]
    run = (
        f'{{"apiVersion": "{group}/v1", "kind": "Run", "metadata": {{"name": "r", "labels": {{"x": "y", "x": "z"}}}}, '
        '"spec": {"workers": 1, "workers": 2, "other": {"p": 1, "p": 2}, "tolerations": [{"key": "a", "key": "b"}]}}'
    )
    duplicates = ("metadata.labels.x", "spec.workers", "spec.other.p", "spec.tolerations[0].key")
    expected = [*(f'duplicate field "{field}"' for field in duplicates), 'unknown field "spec.other"']
    code, status, _ = await send(api, "POST", runs, run, fieldValidation="Strict")
    why = f"strict decoding error: {', '.join(expected)}"
    assert (code, status["message"]) == (400, f'Run in version "v1" cannot be handled as a Run: {why}')
    code, answer, texts = await send(api, "POST", runs, run)
    assert (code, texts, answer["spec"]["workers"]) == (201, expected, 2)
    patch = '{"spec": {"workers": 3, "workers": 4}}'
    code, answer, texts = await send(api, "PATCH", f"{runs}/r", patch, MERGE)
    assert (code, texts, answer["spec"]["workers"]) == (200, ['duplicate field "spec.workers"'], 4)
    assert (await send(api, "PATCH", f"{runs}/r", patch, MERGE, fieldValidation="Strict"))[0] == 422


async def test_yaml(api):
    text = "apiVersion: v1\nkind: ConfigMap\nmetadata:\n  name: one\n  name: one\ndata:\n  a: '1'\n  a: '2'\n"
    lines = [f'line {line} key "{key}" already set in map' for line, key in (("5:", "name"), ("8:", "a"))]
    code, status, _ = await send(api, "POST", api.maps, text, YAML, fieldValidation="Strict")
    why = "strict decoding error: yaml: unmarshal errors:\n  " + "\n  ".join(lines)
    assert (code, status["message"]) == (400, f'ConfigMap in version "v1" cannot be handled as a ConfigMap: {why}')
    code, answer, texts = await send(api, "POST", api.maps, text, YAML)
    assert (code, texts, answer["data"]) == (201, lines, {"a": "2"})


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("apiVersion: v1\nkind: ConfigMap\nmetadata:\n  name: a\ndata:\n  a: '1'\n  a: '2'\n", 7),
        ('{"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "a"}, "data": {"a": "1", "a": "2"}}', 1),
    ],
)
async def test_apply(api, text, line):
    said = f'line {line}: key "a" already set in map'
    query = {"fieldManager": "me"}
    code, status, _ = await send(api, "PATCH", f"{api.maps}/a", text, APPLY, fieldValidation="Strict", **query)
    why = "error strict decoding YAML: error converting YAML to JSON: yaml: unmarshal errors:"
    assert (code, status["message"]) == (400, f"{why}\n  {said}")
    code, answer, texts = await send(api, "PATCH", f"{api.maps}/a", text, APPLY, **query)
    assert (code, texts, answer["data"]) == (201, [said], {"a": "2"})


@pytest.mark.parametrize("kind", [MERGE, STRATEGIC])
async def test_patches(api, kind):
    await api.call("POST", api.maps, api.config_map("p"))
    patch = '{"data": {"a": "1", "a": "2"}, "dat": "x", "data": {"b": "1"}}'
    expected = ['duplicate field "data.a"', 'duplicate field "data"', 'unknown field "dat"']
    code, answer, texts = await send(api, "PATCH", f"{api.maps}/p", patch, kind)
    assert (code, texts, answer["data"]) == (200, expected, {"k": "v", "b": "1"})
    code, status, _ = await send(api, "PATCH", f"{api.maps}/p", patch, kind, fieldValidation="Strict")
    assert code == 422
    assert f"strict decoding error: {', '.join(expected)}" in status["message"]


async def test_json_patch(api):
    await api.call("POST", api.maps, api.config_map("p"))
    patch = '[{"op": "add", "path": "/data/a", "value": "1", "value": "2"}]'
    code, answer, texts = await send(api, "PATCH", f"{api.maps}/p", patch, JSON_PATCH)
    assert (code, texts) == (200, ['json patch duplicate field "[0].value"'])
    assert answer["data"] == {"k": "v", "a": "2"}


async def test_an_invalid_object_has_its_warnings_too(api):
    pod = '{"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p", "name": "p"}, "spec": {"containers": []}}'
    code, _, texts = await send(api, "POST", api.pods, pod)
    assert (code, texts) == (422, ['duplicate field "metadata.name"'])
