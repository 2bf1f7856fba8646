"""A rank that is stopped in the middle of training is named, killed and started again; the run ends as undisturbed."""

import os
import re
import signal

import pytest

from meshwright_local.kube.resources import EVENTS
from tests.e2e.local_stack import NAMESPACE, processes, tiny
from tests.e2e.test_recovery import same, uid_of


@pytest.mark.long
async def test_a_rank_that_hangs_is_named_and_started_again(stage, reference):
    await stage.apply(tiny("hang", recovery={"hangTimeoutSeconds": 8}))
    uid = await uid_of(stage, "hang")
    await stage.trained("hang", 15)
    pods = {p["metadata"]["uid"] for p in await stage.pods("hang")}
    (started,) = re.findall(r"rank started rank=3 generation=1 pid=(\d+)", await stage.log("hang-w1-0"))
    assert int(started) in processes(uid)
    os.kill(int(started), signal.SIGSTOP)
    status = await stage.complete("hang", 180)
    assert [(r.cause, r.count) for r in status.restarts] == [("Hang", 1)]
    assert status.restarts_toward_limit == 1
    assert {p["metadata"]["uid"] for p in await stage.pods("hang")} == pods, "the pods are the same"
    assert int(started) not in processes(uid)
    events = (await stage.client.list(EVENTS, NAMESPACE, field_selector="involvedObject.name=hang")).items
    (message,) = {e["message"] for e in events if e["reason"] == "Hang"}
    named = r"Rank 3 \(worker 1 on \S+, pid \d+, stopped\) has made no progress for \d+ s. Last completed step: \d+"
    assert re.match(named, message), message
    same(await stage.saved("hang"), reference)
    await stage.delete("hang")
