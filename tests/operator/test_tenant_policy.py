"""The administrator's policy: bounds of namespaces, shares of the queue, and a file that is read again."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from meshwright.api.parsing import parse_spec
from meshwright.planner.plan import Plan
from meshwright_operator.administrator_files import policy_file
from meshwright_operator.decide.placement_outcome import Granted, NotGranted
from meshwright_operator.documents import DocumentError
from meshwright_operator.operator_metrics import OperatorMetrics
from meshwright_operator.scheduling.policy import Policy, PolicyError, parse_policy
from meshwright_operator.scheduling.policy_admission import spec_excess
from tests.operator.queueing import Tenants
from tests.operator.test_elastic import FOREVER, edit, elastic, pods, size
from tests.operator.test_gang_races import small
from tests.operator.world import JOBS, World

TWO_TEAMS = """
defaults:
  priority: {min: -10, max: 0}
  maxSpareNodes: 2
namespaces:
- match: research-a
  weight: 3
  priority: {max: 100}
- match: research-*
  maxGpusInUse: 8
"""


def test_the_first_entry_that_matches_adds_to_the_defaults() -> None:
    policy = parse_policy(TWO_TEAMS)
    first, other, unknown = policy.of("research-a"), policy.of("research-b"), policy.of("default")
    assert (first.weight, first.priority.min, first.priority.max, first.max_gpus_in_use) == (3.0, -10, 100, None)
    assert (other.weight, other.priority.max, other.max_gpus_in_use, other.max_spare_nodes) == (1.0, 0, 8, 2)
    assert (unknown.priority.max, unknown.max_gpus_in_use) == (0, None)
    assert parse_policy("") == Policy()


@pytest.mark.parametrize(
    ("prefixes", "uri", "allowed"),
    [
        (None, "s3://any/where", True),
        ([], "s3://any/where", False),
        ([], None, True),
        (["s3://ours/{namespace}/"], "s3://ours/team", True),
        (["s3://ours/{namespace}"], "s3://ours/team/runs/", True),
        (["s3://ours/{namespace}"], "s3://ours/teams/runs", False),
        (["s3://ours/{namespace}"], "s3://ours/other", False),
        (["s3://ours/{namespace}"], "s3://ours/team/../other", False),
        (["gs://a", "s3://ours"], "s3://ours/x", True),
    ],
)
def test_checkpoints_are_saved_only_below_the_prefixes_of_the_namespace(
    prefixes: list[str] | None, uri: str | None, *, allowed: bool
) -> None:
    spec = parse_spec(small("job", 2, checkpoint={"uri": uri} if uri else {"claimName": "c"}))
    bounds = parse_policy(json.dumps({"defaults": {"checkpointPrefixes": prefixes} if prefixes is not None else {}}))
    layout = SimpleNamespace(world_size=4, data=2)
    excess = spec_excess(spec, cast(Plan, SimpleNamespace(layout=layout)), "team", bounds.of("team"))
    assert (excess == "") is allowed
    assert allowed or f"`spec.checkpoint.uri` is {uri}: use " in excess


@pytest.mark.parametrize(
    ("prefixes", "source", "allowed"),
    [
        (["s3://ours/{namespace}/"], "s3://ours/team/base-0a1b2c3d/step-00004000-g3", True),
        (["s3://ours/{namespace}/"], "s3://ours/other/base-0a1b2c3d", False),
        (["s3://ours/{namespace}/"], "base-0a1b2c3d", True),
        ([], "s3://ours/team/base-0a1b2c3d", False),
        ([], "base-0a1b2c3d", True),
        (None, "s3://ours/other/base-0a1b2c3d", True),
    ],
)
def test_checkpoints_of_other_runs_are_read_only_below_the_prefixes_of_the_namespace(
    prefixes: list[str] | None, source: str, *, allowed: bool
) -> None:
    spec = parse_spec(small("job", 2, checkpoint={"claimName": "c", "resumeFrom": source}))
    bounds = parse_policy(json.dumps({"defaults": {"checkpointPrefixes": prefixes} if prefixes is not None else {}}))
    layout = SimpleNamespace(world_size=4, data=2)
    excess = spec_excess(spec, cast(Plan, SimpleNamespace(layout=layout)), "team", bounds.of("team"))
    assert (excess == "") is allowed
    assert allowed or f"`spec.checkpoint.resumeFrom` is {source}: use " in excess


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("defaults: {maxGpu: 3}", "unknown field `defaults.maxGpu`"),
        ("namespaces: [{match: a, weight: 0}]", "`namespaces[0].weight`: input should be greater than 0, got '0'"),
        ("namespaces: [{weight: 1}]", "`namespaces[0].match`: field required"),
        ("defaults: {priority: {min: 3, max: 1}}", "`min` (3) must be at most `max` (1)"),
        ("defaults: {maxReplicas: -1}", "`defaults.maxReplicas`"),
        ("- 1", "must be a mapping"),
        ("a: [", "not valid YAML"),
        ("namespaces: [{match: 'A b'}]", "`namespaces[0].match`"),
    ],
)
def test_an_invalid_document_names_the_field(text: str, problem: str) -> None:
    with pytest.raises(PolicyError) as error:
        parse_policy(text)
    assert problem in str(error.value)


async def test_a_changed_file_is_applied_and_a_broken_one_leaves_the_last(tmp_path: Path) -> None:
    path, applied, metrics = tmp_path / "policy.yaml", list[Policy](), OperatorMetrics()
    path.write_text("defaults: {maxReplicas: 4}")
    file = policy_file(path, metrics, applied.append)
    file.load()
    await file.check()
    assert [policy.of("x").max_replicas for policy in applied] == [4]
    for broken in ("defaults: [", "defaults: {maxReplicas: many}"):
        path.write_text(broken)
        await file.check()
        assert valid(metrics) == 0
    path.unlink()
    await file.check()
    assert len(applied) == 1
    path.write_text("defaults: {maxReplicas: 5}")
    await file.check()
    assert [policy.of("x").max_replicas for policy in applied] == [4, 5]
    assert valid(metrics) == 1


async def test_a_file_that_is_restored_to_what_is_in_effect_is_valid(tmp_path: Path) -> None:
    path, applied, metrics = tmp_path / "policy.yaml", list[Policy](), OperatorMetrics()
    path.write_text("defaults: {maxReplicas: 4}")
    file = policy_file(path, metrics, applied.append)
    file.load()
    path.write_text("defaults: [")
    await file.check()
    assert valid(metrics) == 0
    path.write_text("defaults: {maxReplicas: 4}")
    await file.check()
    assert valid(metrics) == 1
    assert len(applied) == 1, "nothing has changed"


def valid(metrics: OperatorMetrics) -> float | None:
    return metrics.registry.get_sample_value("ptj_policy_valid")


def test_a_process_does_not_start_without_the_administrators_bounds(tmp_path: Path) -> None:
    for content in (None, "defaults: 3"):
        path = tmp_path / "policy.yaml"
        if content is not None:
            path.write_text(content)
        with pytest.raises(DocumentError, match=r"policy\.yaml"):
            policy_file(path, OperatorMetrics(), lambda policy: None).load()


FILLS = {"elastic": {"fill": True, "maxReplicas": 2}, "checkpoint": {"claimName": "c"}}


@pytest.mark.parametrize(
    ("bounds", "fields", "words"),
    [
        ("priority: {max: 3}", {"priority": 1000}, "`spec.priority` is 1000: use at most 3"),
        ("priority: {min: 0}", {"priority": -1}, "`spec.priority` is -1: use at least 0"),
        ("maxSpareNodes: 1", {"recovery": {"spareNodes": 9}}, "`spec.recovery.spareNodes` is 9: use at most 1"),
        ("maxReplicas: 1", {}, "`spec.replicas` is 2: use at most 1"),
        ("maxReplicas: 1", FILLS, "`spec.elastic.maxReplicas` is 2: use at most 1"),
        ("maxGpusPerJob: 3", {}, "the job needs 4 GPUs: use at most 3"),
        ("maxGpusInUse: 3", {}, "the job needs 4 GPUs: all jobs of the namespace may use at most 3"),
    ],
)
async def test_a_job_beyond_a_bound_says_so_and_starts_when_the_bound_allows_it(
    bounds: str, fields: dict[str, Any], words: str
) -> None:
    world = World(20, nodes=4, work=10**6)
    operator = world.operators[0]
    operator.scheduler.set_policy(parse_policy(f"defaults: {{{bounds}}}"))
    world.submit(small("job", 2, **fields))
    await world.run(5)
    stalled = world.condition("job", "Stalled")
    assert (stalled["status"], stalled["reason"]) == ("True", "PolicyExceeded")
    assert words in stalled["message"]
    assert "namespace default" in stalled["message"]
    (event,) = [note for name, note in operator.notes.notes if name == "job"]
    assert (event.reason, event.type) == ("PolicyExceeded", "Warning")
    assert words in event.message
    assert not world.pods()
    operator.scheduler.set_policy(Policy())
    await world.run(20)
    assert world.true("job", "Ready")


async def test_a_quota_that_frees_up_is_waited_for() -> None:
    world = World(21, nodes=6, work=20.0)
    operator = world.operators[0]
    operator.scheduler.set_policy(parse_policy("defaults: {maxGpusInUse: 6}"))
    world.submit(small("first", 2))
    await world.run(3)
    world.submit(small("second", 2))
    await world.run(3)
    placed = world.condition("second", "Placed")
    assert (placed["status"], placed["reason"]) == ("False", "PolicyExceeded")
    assert "6 GPUs (`maxGpusInUse`): 4 are in use, and the job needs 4" in placed["message"]
    assert world.condition("second", "Reconciling")["status"] == "True"
    assert operator.notes.reasons("second") == ["PolicyExceeded"]
    await world.run(200)
    assert world.true("first", "Complete")
    assert world.true("second", "Complete")


async def test_a_policy_never_stops_what_runs_and_replaces_its_lost_pods() -> None:
    world = World(22, nodes=6, work=10**6)
    operator = world.operators[0]
    world.submit(small("runs", 2, priority=50, recovery={"spareNodes": 2}))
    await world.run(20)
    assert world.true("runs", "Ready")
    strict = "defaults: {priority: {max: 0}, maxReplicas: 1, maxGpusInUse: 2, maxSpareNodes: 0, maxWaitingJobs: 0}"
    operator.scheduler.set_policy(parse_policy(strict))
    await world.run(20)
    world.crash("runs-w0-0")
    await world.run(40)
    assert world.true("runs", "Ready")
    assert world.status("runs")["mesh"]["generation"] == 2
    assert world.status("runs")["placement"].get("spares", []) == []


async def test_an_edit_beyond_a_bound_is_blocked_and_the_job_keeps_running() -> None:
    world = World(23, nodes=6, work=10**6)
    world.operators[0].scheduler.set_policy(parse_policy("defaults: {maxReplicas: 2}"))
    world.submit(small("grows", 2))
    await world.run(20)
    edited = world.cluster.objects[f"{JOBS}/grows"]
    edited["spec"]["replicas"] = 3
    edited["metadata"]["generation"] = 2
    world.cluster.update(f"{JOBS}/grows", edited)
    await world.run(20)
    ready = world.condition("grows", "Ready")
    assert (ready["status"], ready["reason"]) == ("False", "PolicyExceeded")
    assert "`spec.replicas` is 3: use at most 2" in ready["message"]
    events = [note for _, note in world.operators[0].notes.notes if note.reason == "PolicyExceeded"]
    assert [event.type for event in events] == ["Warning"], "once, however often the job is reconciled"
    assert "`spec.replicas` is 3: use at most 2" in events[0].message
    assert len(world.agents) == 2
    assert world.status("grows")["mesh"]["generation"] == 1


@pytest.mark.parametrize(
    ("beyond", "within", "words"),
    [
        ({"priority": 99}, {"priority": 10}, "`spec.priority` is 99: use at most 10"),
        ({"priority": -9}, {"priority": 0}, "`spec.priority` is -9: use at least 0"),
        (
            {"recovery": {"spareNodes": 3}},
            {"recovery": {"spareNodes": 1}},
            "`spec.recovery.spareNodes` is 3: use at most 1",
        ),
    ],
)
async def test_an_edit_that_restarts_nothing_is_blocked_beyond_a_bound_too(
    beyond: dict[str, Any], within: dict[str, Any], words: str
) -> None:
    world = World(25, nodes=6, work=10**6)
    bounds = "defaults: {priority: {min: 0, max: 10}, maxSpareNodes: 1}"
    world.operators[0].scheduler.set_policy(parse_policy(bounds))
    world.submit(small("job", 2))
    await world.run(20)
    edit(world, "job", **beyond)
    await world.run(20)
    ready = world.condition("job", "Ready")
    assert (ready["status"], ready["reason"]) == ("False", "PolicyExceeded")
    assert words in ready["message"]
    assert world.status("job")["placement"].get("spares", []) == []
    await world.run(120)
    assert world.condition("job", "Ready")["reason"] == "PolicyExceeded", "it stays blocked"
    assert world.operators[0].notes.reasons("job").count("PolicyExceeded") == 1
    edit(world, "job", **within)
    await world.run(20)
    assert world.true("job", "Ready"), world.condition("job", "Ready")
    assert world.status("job")["mesh"]["generation"] == 1


async def test_only_so_many_jobs_of_a_namespace_wait() -> None:
    tenants = Tenants(2)
    tenants.scheduler.set_policy(parse_policy("namespaces: [{match: 'team-*', maxWaitingJobs: 1}]"))
    await tenants.start("runs", 2)
    answers = [await tenants.ask(tenants.request(name, 2)) for name in ("team-a/one", "team-a/two", "other/one")]
    assert [answer.reason for answer in answers if isinstance(answer, NotGranted)] == ["", "PolicyExceeded", ""]
    assert "1 job of namespace team-a to wait" in str(answers[1])
    await tenants.freed()
    tenants.scheduler.withdraw("uid-team-a/one")
    del tenants.cache.jobs[tenants.request("team-a/one", 2).key]
    tenants.scheduler.set_policy(parse_policy("namespaces: [{match: 'team-*', maxWaitingJobs: 1}]"))
    assert "team-a/two" in await tenants.freed()
    assert (await refused(tenants, "team-a/two")) == ""


async def refused(tenants: Tenants, name: str) -> str:
    answer = await tenants.ask(tenants.request(name, 2))
    assert isinstance(answer, NotGranted)
    return answer.reason


async def test_the_namespace_that_uses_least_for_its_weight_is_first() -> None:
    tenants = Tenants(12)
    tenants.scheduler.set_policy(parse_policy("namespaces: [{match: heavy, weight: 4}]"))
    await tenants.start("greedy/runs", 3)
    await tenants.start("heavy/runs", 6)
    await tenants.start("ends/runs", 3)
    for name in ("greedy/waits", "heavy/waits", "fresh/waits"):
        assert isinstance(await tenants.ask(tenants.request(name, 3)), NotGranted)
    order = []
    tenants.end("ends/runs")
    for _ in range(3):
        first = next(name for name in await tenants.freed() if name.endswith("waits"))
        order.append(first)
        await tenants.start(first, 3)
        tenants.end(first)
    assert order == ["fresh/waits", "heavy/waits", "greedy/waits"], "0, 12/4 and 6 GPUs in use"


async def test_a_priority_beyond_the_bound_counts_as_the_bound() -> None:
    tenants = Tenants(2)
    await tenants.start("runs", 2)
    await tenants.ask(tenants.request("a/old", 2))
    await tenants.ask(tenants.request("b/loud", 2, priority=10**9))
    tenants.scheduler.set_policy(parse_policy("defaults: {priority: {max: 0}}"))
    await tenants.freed()
    tenants.end("runs")
    assert await tenants.freed() == ["a/old"]
    assert isinstance(await tenants.ask(tenants.request("a/old", 2)), Granted)


async def test_a_storm_of_jobs_of_one_tenant_does_not_delay_another() -> None:
    tenants = Tenants(4)
    await tenants.start("flood/runs", 2)
    await tenants.start("other/runs", 2)
    await asyncio.gather(*(tenants.ask(tenants.request(f"flood/job{number}", 2)) for number in range(30)))
    await tenants.freed()
    await tenants.ask(tenants.request("quiet/job", 2))
    tenants.end("other/runs")
    assert await tenants.freed() == ["quiet/job"]


async def test_finished_jobs_without_a_time_to_live_get_that_of_the_policy() -> None:
    world = World(23, nodes=6, work=20.0)
    operator = world.operators[0]
    world.submit(small("plain", 2))
    world.submit(small("kept", 1, ttlSecondsAfterFinished=10**6))
    await world.run(100)
    assert world.true("plain", "Complete")
    assert world.true("kept", "Complete")
    operator.scheduler.set_policy(parse_policy("defaults: {ttlSecondsAfterFinished: 100000}"))
    await world.run(150)
    assert {path for path in world.cluster.objects if path.startswith(JOBS)} == {f"{JOBS}/plain", f"{JOBS}/kept"}
    operator.scheduler.set_policy(parse_policy("namespaces: [{match: 'def*', ttlSecondsAfterFinished: 100}]"))
    await world.run(150)
    assert {path for path in world.cluster.objects if path.startswith(JOBS)} == {f"{JOBS}/kept"}


@pytest.mark.parametrize(
    ("bound", "words"),
    [
        ("maxReplicas: 2", "`spec.replicas` is 4: use at most 2"),
        ("maxGpusPerJob: 4", "the job needs 8 GPUs: use at most 4"),
    ],
)
async def test_an_elastic_job_does_not_grow_beyond_a_bound_of_one_job(bound: str, words: str) -> None:
    """A job that had started within the bound could be scaled beyond it."""
    world = World(29, nodes=4, work=FOREVER)
    operator = world.operators[0]
    operator.scheduler.set_policy(parse_policy(f"defaults: {{{bound}}}"))
    world.submit(elastic("job", 2, maxReplicas=4))
    await world.run(20)
    edit(world, "job", replicas=4)
    await world.run(120)
    ready = world.condition("job", "Ready")
    assert (ready["status"], ready["reason"]) == ("False", "PolicyExceeded")
    assert words in ready["message"]
    assert (size(world, "job"), len(world.agents)) == (2, 2)
    assert operator.notes.reasons("job").count("PolicyExceeded") == 1
    operator.scheduler.set_policy(Policy())
    await world.run(60)
    assert (size(world, "job"), world.true("job", "Ready")) == (4, True)


async def test_an_elastic_job_gets_back_what_it_had_before_a_bound() -> None:
    world = World(30, nodes=4, work=FOREVER)
    world.submit(elastic("job", 4, onLoss="Shrink", pauseSeconds=10))
    await world.run(20)
    world.operators[0].scheduler.set_policy(parse_policy("defaults: {maxReplicas: 2}"))
    world.crash(max(pods(world, "job")))
    await world.run(60)
    assert world.operators[0].notes.reasons("job").count("Rescaled") == 2, "smaller, and then as large as before"
    assert (size(world, "job"), world.true("job", "Ready")) == (4, True)


async def test_a_suspended_elastic_job_does_not_resume_beyond_a_bound() -> None:
    world = World(31, nodes=4, work=FOREVER)
    operator = world.operators[0]
    operator.scheduler.set_policy(parse_policy("defaults: {maxReplicas: 2}"))
    world.submit(elastic("job", 2, maxReplicas=4))
    await world.run(20)
    edit(world, "job", suspend=True)
    await world.run(60)
    edit(world, "job", suspend=False, replicas=4)
    await world.run(60)
    assert size(world, "job") == 2
    assert world.condition("job", "Ready")["reason"] == "PolicyExceeded"
