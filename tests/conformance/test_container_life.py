"""Hooks, probes and restart rules of containers: what the API server fills in, and what it rejects."""

import pytest

RUN = {"exec": {"command": ["true"]}}


def rule(**more):
    return {"action": "Restart", "exitCodes": {"operator": "In", "values": [1]}, **more}


def in_init(**fields):
    return {"initContainers": [{"name": "i", "image": "b", **fields}]}


def in_main(**fields):
    return {"containers": [{"name": "a", "image": "b", **fields}]}


def hook(**handler):
    return in_main(lifecycle={"preStop": handler})


MAIN, INIT = "spec.containers[0]", "spec.initContainers[0]"
FORBIDDEN = "Forbidden: may not be set for init containers without restartPolicy=Always"
WRONG = {
    "hook of nothing": (hook(), f"{MAIN}.lifecycle.preStop: Required value: must specify a handler type"),
    "two hooks in one": (
        hook(**RUN, sleep={"seconds": 1}),
        f"{MAIN}.lifecycle.preStop.sleep: Forbidden: may not specify more than 1 handler type",
    ),
    "longer than the grace period": (
        hook(sleep={"seconds": 31}),
        f"{MAIN}.lifecycle.preStop.sleep: Invalid value: 31: "
        "must be non-negative and less than terminationGracePeriodSeconds (30)",
    ),
    "command of nothing": (
        in_main(livenessProbe={"exec": {}}),
        f"{MAIN}.livenessProbe.exec.command: Required value",
    ),
    "port": (
        in_main(livenessProbe={"httpGet": {"port": 0}}),
        f"{MAIN}.livenessProbe.httpGet.port: Invalid value: 0: must be between 1 and 65535, inclusive",
    ),
    "port's name, scheme": (
        hook(httpGet={"port": "--", "scheme": "FTP"}),
        f'[{MAIN}.lifecycle.preStop.httpGet.port: Invalid value: "--": must contain at least one letter (a-z), '
        f'{MAIN}.lifecycle.preStop.httpGet.port: Invalid value: "--": must not contain consecutive hyphens, '
        f'{MAIN}.lifecycle.preStop.httpGet.port: Invalid value: "--": must not begin or end with a hyphen, '
        f'{MAIN}.lifecycle.preStop.httpGet.scheme: Unsupported value: "FTP": supported values: "HTTP", "HTTPS"]',
    ),
    "successes of a liveness probe": (
        in_main(livenessProbe={**RUN, "successThreshold": 2}),
        f"{MAIN}.livenessProbe.successThreshold: Invalid value: 2: must be 1",
    ),
    "grace period of a readiness probe": (
        in_main(readinessProbe={**RUN, "terminationGracePeriodSeconds": 5}),
        f"{MAIN}.readinessProbe.terminationGracePeriodSeconds: Invalid value: 5: must not be set for readinessProbes",
    ),
    "no grace period of a startup probe": (
        in_main(startupProbe={**RUN, "terminationGracePeriodSeconds": 0}),
        f"{MAIN}.startupProbe.terminationGracePeriodSeconds: Invalid value: 0: must be greater than 0",
    ),
    "rules without a policy": (
        in_main(restartPolicyRules=[rule()]),
        f"{MAIN}.restartPolicy: Required value: must specify restartPolicy when restart rules are used",
    ),
    "rules": (
        in_main(restartPolicy="Sometimes", restartPolicyRules=[rule(action="X"), {"action": "Restart"}]),
        f'[{MAIN}.restartPolicy: Unsupported value: "Sometimes": supported values: "Always", "Never", "OnFailure", '
        f'{MAIN}.restartPolicyRules[0].action: Unsupported value: "X": supported values: "Restart", '
        f'"RestartAllContainers", {MAIN}.restartPolicyRules[1].exitCodes: Required value: must be specified]',
    ),
    "operator": (
        in_main(restartPolicy="Never", restartPolicyRules=[rule(exitCodes={"operator": "Is"})]),
        f'{MAIN}.restartPolicyRules[0].exitCodes.operator: Unsupported value: "Is": supported values: "In", "NotIn"',
    ),
    "too many rules": (
        in_main(restartPolicy="Never", restartPolicyRules=[rule()] * 21),
        f"{MAIN}.restartPolicyRules: Too many: 21: must have at most 20 items",
    ),
    "too many codes": (
        in_main(restartPolicy="Never", restartPolicyRules=[rule(exitCodes={"operator": "In", "values": [0] * 256})]),
        f"{MAIN}.restartPolicyRules[0].exitCodes.values: Too many: 256: must have at most 255 items",
    ),
    "rules of an init container without a policy": (
        in_init(restartPolicyRules=[rule(action="X")]),
        f"{INIT}.restartPolicy: Required value: must specify restartPolicy when restart rules are used",
    ),
    "probe of an init container": (
        in_init(restartPolicy="Foo", livenessProbe=RUN),
        f'[{INIT}.restartPolicy: Unsupported value: "Foo": supported values: "Always", "Never", "OnFailure", '
        f"{INIT}.livenessProbe: {FORBIDDEN}]",
    ),
    "hook of an init container": (in_init(lifecycle={"postStart": RUN}), f"{INIT}.lifecycle: {FORBIDDEN}"),
    "hook of a sidecar": (
        in_init(restartPolicy="Always", lifecycle={"postStart": {}}),
        f"{INIT}.lifecycle.postStart: Required value: must specify a handler type",
    ),
}


@pytest.mark.parametrize(("spec", "text"), WRONG.values(), ids=WRONG)
async def test_what_is_wrong_is_named(api, spec, text):
    code, status = await api.call("POST", api.pods, api.pod("bad", **spec))
    assert (code, status["message"]) == (422, f'Pod "bad" is invalid: {text}')


async def test_defaults(api):
    probe = {"grpc": {"port": 5}, "failureThreshold": 0}
    # The feature of stop signals is off by default.
    hooks = {"preStop": {"httpGet": {"port": "x"}}, "stopSignal": "SIGUSR1"}
    code, pod = await api.call("POST", api.pods, api.pod("p", **in_main(lifecycle=hooks, readinessProbe=probe)))
    assert code == 201
    container = pod["spec"]["containers"][0]
    assert container["lifecycle"] == {"preStop": {"httpGet": {"port": "x", "path": "/", "scheme": "HTTP"}}}
    assert container["readinessProbe"]["grpc"] == {"port": 5, "service": ""}
    assert container["readinessProbe"]["failureThreshold"] == 3


@pytest.mark.parametrize(
    "spec",
    [
        in_main(restartPolicy="Never", restartPolicyRules=[rule(), rule(action="RestartAllContainers")]),
        in_init(restartPolicy="Always", restartPolicyRules=[rule()]),
        in_init(restartPolicy="OnFailure"),
        hook(sleep={"seconds": 0}),
        {"terminationGracePeriodSeconds": -1, **hook(sleep={"seconds": 1})},
    ],
)
async def test_what_is_accepted(api, spec):
    code, answer = await api.call("POST", api.pods, api.pod("good", **spec))
    assert code == 201, answer
    for key in spec.keys() & {"containers", "initContainers"}:
        for sent, stored in zip(spec[key], answer["spec"][key], strict=True):
            assert sent.items() <= stored.items()
