"""Ephemeral containers: added by a subresource of their own, as `kubectl debug` does, and then fixed."""

import pytest

STRATEGIC = "application/strategic-merge-patch+json"


def debugger(name="dbg", **fields):
    return {"name": name, "image": "busybox", **fields}


async def add(api, *containers, pod="p"):
    body = {"spec": {"ephemeralContainers": list(containers)}}
    return await api.call("PATCH", f"{api.pods}/{pod}/ephemeralcontainers", body, STRATEGIC)


@pytest.fixture
async def pod(api):
    code, made = await api.call("POST", api.pods, api.pod("p"))
    assert code == 201
    return made


async def test_they_are_added_with_their_defaults(api, pod):
    code, answer = await add(api, debugger(command=["sh"], stdin=True, tty=True, targetContainerName="a"))
    assert code == 200, answer
    (container,) = answer["spec"]["ephemeralContainers"]
    assert container == {
        **debugger(command=["sh"], stdin=True, tty=True, targetContainerName="a"),
        **{"imagePullPolicy": "Always", "resources": {}},
        **{"terminationMessagePath": "/dev/termination-log", "terminationMessagePolicy": "File"},
    }
    assert answer["metadata"]["generation"] == pod["metadata"]["generation"] + 1
    code, answer = await add(api, debugger("other"))
    assert (code, [one["name"] for one in answer["spec"]["ephemeralContainers"]]) == (200, ["other", "dbg"])
    _, seen = await api.call("GET", f"{api.pods}/p/ephemeralcontainers")
    assert (seen["kind"], len(seen["spec"]["ephemeralContainers"])) == ("Pod", 2)


async def test_nothing_else_changes_with_them(api, pod):
    body = {**pod, "metadata": {**pod["metadata"], "labels": {"x": "y"}}}
    body["spec"] = {**pod["spec"], "schedulerName": "other", "ephemeralContainers": [debugger()]}
    code, answer = await api.call("PUT", f"{api.pods}/p/ephemeralcontainers", body)
    assert code == 200, answer
    assert answer["metadata"]["labels"] == pod["metadata"]["labels"]
    assert answer["spec"]["schedulerName"] == pod["spec"]["schedulerName"]
    assert [one["name"] for one in answer["spec"]["ephemeralContainers"]] == ["dbg"]


PATH = "spec.ephemeralContainers"


@pytest.mark.parametrize(
    ("container", "text"),
    [
        (debugger("a"), f'{PATH}[0].name: Duplicate value: "a"'),
        (debugger(targetContainerName="nobody"), f'{PATH}[0].targetContainerName: Not found: "nobody"'),
        ({"name": "dbg"}, f"{PATH}[0].image: Required value"),
        (
            debugger(ports=[{"containerPort": 1}]),
            f"{PATH}[0].ports: Forbidden: cannot be set for an Ephemeral Container",
        ),
        (
            debugger(livenessProbe={"exec": {"command": ["a"]}}),
            f"{PATH}[0].livenessProbe: Forbidden: cannot be set for an Ephemeral Container",
        ),
        (debugger(volumeMounts=[{"name": "v", "mountPath": "/v"}]), f'{PATH}[0].volumeMounts[0].name: Not found: "v"'),
    ],
)
async def test_they_are_checked(api, pod, container, text):
    code, status = await add(api, container)
    assert (code, status["message"]) == (422, f'Pod "p" is invalid: {text}')


async def test_they_stay(api, pod):
    assert (await add(api, debugger()))[0] == 200
    for changed, word in (([], "removed"), ([debugger(command=["other"])], "changed")):
        _, now = await api.call("GET", f"{api.pods}/p")
        body = {**now, "spec": {**now["spec"], "ephemeralContainers": changed}}
        code, status = await api.call("PUT", f"{api.pods}/p/ephemeralcontainers", body)
        assert code == 422
        text = f'{PATH}: Forbidden: existing ephemeral containers "dbg" may not be {word}'
        assert status["message"].startswith(f'Pod "p" is invalid: {text}')


async def test_only_that_subresource_adds_them(api, pod):
    code, status = await api.call("POST", api.pods, api.pod("q", ephemeralContainers=[debugger()]))
    text = f"{PATH}: Forbidden: cannot be set on create"
    assert (code, status["message"]) == (422, f'Pod "q" is invalid: {text}')
    body = {"spec": {"ephemeralContainers": [debugger()]}}
    assert (await api.call("PATCH", f"{api.pods}/p", body, STRATEGIC))[0] == 422
    assert (await add(api, debugger(), pod="nobody"))[0] == 404
