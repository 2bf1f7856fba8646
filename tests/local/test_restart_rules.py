"""Restart policies and rules of containers, as KEP-5307 and KEP-5532 define them."""

import pytest

from meshwright_local.nodeagent.restarts import RestartPolicy

pytestmark = pytest.mark.asyncio(loop_scope="module")

MOUNTS = [{"name": "shared", "mountPath": "/shared"}]
VOLUMES = [{"name": "shared", "emptyDir": {}}]
# Counts the runs of a container in a file.
RUNS = 'n=$(($(cat "$F" 2>/dev/null || echo 0) + 1)); echo $n > "$F"; '


def env(name):
    return [{"name": "F", "value": f"/shared/{name}"}]


def rule(operator, *values, action="Restart"):
    return {"action": action, "exitCodes": {"operator": operator, "values": list(values)}}


@pytest.mark.parametrize(
    ("policy", "rules", "code", "action"),
    [
        ("Never", [], 1, ""),
        ("OnFailure", [], 1, "Restart"),
        ("OnFailure", [], 0, ""),
        ("Always", [], 0, "Restart"),
        ("Never", [rule("In", 42)], 42, "Restart"),
        ("Never", [rule("In", 42)], 1, ""),
        ("Never", [rule("NotIn", 42)], 1, "Restart"),
        ("Never", [rule("In", 7, action="RestartAllContainers"), rule("In", 7)], 7, "RestartAllContainers"),
        ("Always", [rule("In", 7)], 3, "Restart"),
    ],
)
async def test_the_first_rule_that_matches_counts(policy, rules, code, action):
    assert RestartPolicy.of({"restartPolicy": policy, "restartPolicyRules": rules}, "Always").action(code) == action


async def test_rules_restart_a_container_of_a_pod_that_never_restarts(kit):
    script = RUNS + "[ $n -ge 3 ] && exit 5; exit 42"
    more = {"restartPolicy": "Never", "restartPolicyRules": [rule("In", 42)]}
    await kit.pod("rules", script, env=env("n"), volumeMounts=MOUNTS, spec={"volumes": VOLUMES}, **more)
    pod = await kit.ended("rules")
    status = pod["status"]["containerStatuses"][0]
    assert (pod["status"]["phase"], status["restartCount"]) == ("Failed", 2)
    assert status["state"]["terminated"]["exitCode"] == 5
    assert status["lastState"]["terminated"]["exitCode"] == 42


async def test_a_containers_policy_overrides_that_of_its_pod(kit):
    once = {"name": "once", "image": "none", "command": ["sh", "-c", "exit 0"], "restartPolicy": "Never"}
    failing = {"name": "main", "image": "none", "command": ["sh", "-c", "exit 4"], "restartPolicy": "Never"}
    await kit.pod("override", "", spec={"restartPolicy": "Always", "containers": [once, failing]})
    pod = await kit.ended("override")
    assert pod["status"]["phase"] == "Failed"
    assert [item["restartCount"] for item in pod["status"]["containerStatuses"]] == [0, 0]


async def test_an_init_container_with_a_rule_is_restarted(kit):
    init = {
        **{"name": "init", "image": "none", "env": env("n"), "volumeMounts": MOUNTS},
        "command": ["sh", "-c", RUNS + "[ $n -ge 2 ] || exit 42"],
        **{"restartPolicy": "Never", "restartPolicyRules": [rule("In", 42)]},
    }
    await kit.pod("init-rule", "true", spec={"initContainers": [init], "volumes": VOLUMES})
    pod = await kit.ended("init-rule")
    assert pod["status"]["phase"] == "Succeeded"
    assert pod["status"]["initContainerStatuses"][0]["restartCount"] == 1


async def test_a_rule_restarts_all_containers_in_the_same_pod(kit):
    """Init containers run again, sidecars and the others are stopped; address and volumes stay."""
    mounted = {"image": "none", "volumeMounts": MOUNTS}

    def container(name, script, **more):
        command = ["sh", "-c", script, "sh", name, "/shared/notes", "/shared/n"]
        return {**mounted, "name": name, "command": command, **more}

    say = 'echo "$1" >> "$2"; '
    wait = "while :; do sleep 0.05; done"
    init = container("init", say)
    side = container("side", f"trap 'exit 0' TERM; {say}{wait}", restartPolicy="Always")
    other = container("other", f"trap 'exit 0' TERM; {say}until [ $(wc -l < $3) -ge 2 ]; do sleep 0.05; done")
    source = container(
        "source",
        'echo x >> "$3"; until [ $(grep -c other "$2") -ge $(wc -l < $3) ]; do sleep 0.05; done; '
        "[ $(wc -l < $3) -ge 2 ] || exit 88",
        **{"restartPolicy": "Never", "restartPolicyRules": [rule("In", 88, action="RestartAllContainers")]},
    )
    spec = {"initContainers": [init, side], "containers": [other, source], "volumes": VOLUMES}
    await kit.pod("all", "", spec=spec)
    seen = await kit.running("all")
    pod = await kit.ended("all", 20)
    status = pod["status"]
    assert (status["phase"], status["podIP"]) == ("Succeeded", seen["status"]["podIP"])
    both = [*status["initContainerStatuses"], *status["containerStatuses"]]
    counts = {item["name"]: item["restartCount"] for item in both}
    assert counts == {"init": 1, "side": 1, "other": 1, "source": 1}
    last = {item["name"]: item["lastState"]["terminated"] for item in status["containerStatuses"]}
    assert {item["reason"] for item in last.values()} == {"RestartingAllContainers"}
    condition = next(item for item in status["conditions"] if item["type"] == "AllContainersRestarting")
    assert condition["status"] == "False"
    uid, node = pod["metadata"]["uid"], pod["spec"]["nodeName"]
    file = kit.cluster.directory / "nodes" / node / "pods" / uid / "volumes" / "shared" / "notes"
    assert file.read_text().split() == ["init", "side", "other"] * 2
