"""A rank fails, and the check before the next start finds that its node computes wrongly: the worker moves away."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.local_stack import Stage, tiny
from tests.e2e.test_memory_recovery import events_of
from tests.e2e.test_recovery import same, uid_of

NAME = "nodecheck"

pytestmark = pytest.mark.long

BROKEN = '''
import os, sys

class Break:
    """Makes the products of the node check wrong in the first pod of worker 1, and so on its node."""

    def find_spec(self, name, path=None, target=None):
        if name.endswith("distributed.node_check"):
            import torch
            multiply = torch.mm
            torch.mm = lambda a, b: multiply(a, b) + (a.shape == (512, 256))
        return None

if (os.environ.get("MESHWRIGHT_WORKER_INDEX"), os.environ.get("MESHWRIGHT_INCARNATION")) == ("1", "0"):
    sys.meta_path.insert(0, Break())
'''


async def test_a_node_that_computes_wrongly_is_left_at_the_next_start(
    stage: Stage, reference: dict[str, Any], tmp_path: Path
) -> None:
    tmp_path.joinpath("sitecustomize.py").write_text(BROKEN)
    recovery = {"suspectNodes": {"checkNodes": True, "failures": 10}}
    await stage.apply(tiny(NAME, recovery=recovery, workers={"env": [{"name": "PYTHONPATH", "value": str(tmp_path)}]}))
    uid = await uid_of(stage, NAME)
    await stage.trained(NAME, 15)
    (started,) = re.findall(r"rank started rank=3 generation=1 pid=(\d+)", await stage.log(f"{NAME}-w1-0"))
    (before,) = [pod["spec"]["nodeName"] for pod in await stage.pods(NAME) if pod["metadata"]["name"] == f"{NAME}-w1-0"]
    os.kill(int(started), signal.SIGKILL)

    status = await stage.complete(NAME)
    assert [(r.cause, r.count) for r in status.restarts] == [("RankFailure", 2)]
    (entry,) = status.suspect_nodes or ()
    assert (entry.node, entry.worker, entry.failures) == (before, 1, 2)
    assert status.placement is not None
    assert before not in {worker.node for worker in status.placement.workers}
    (message,) = (await events_of(stage, uid))["NodeSuspect"]
    assert "node check: 512 of 512 rows of a matrix product are wrong" in message
    same(await stage.saved(NAME), reference)
    await stage.delete(NAME)
