"""An operator that is asked to stop, or of which a part fails, always exits, and says what kept it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from meshwright_operator.controller import manager
from meshwright_operator.kube.recorder import EventRecorder
from meshwright_operator.kube.resync import Resync
from meshwright_operator.settings import Settings
from tests.operator.agents import Kubelet
from tests.operator.conftest import Settled, StartOperator
from tests.operator.support import JOBS, Api, OperatorThread, job, until, write_kubeconfig
from tests.operator.test_first_contact import KUBECONFIG
from tests.patience import patient
from tests.tiers import mostly_long

START = """
import asyncio, time
from meshwright_operator import __main__ as program, exit_limit
from meshwright_operator.controller import manager

async def deaf() -> None:
    print("ready", flush=True)
    while True:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            pass

async def waits_for_a_thread() -> None:
    waiting = asyncio.create_task(asyncio.to_thread(time.sleep, 3600))
    print("ready", flush=True)
    await waiting

async def blocks() -> None:
    print("ready", flush=True)
    try:
        await asyncio.sleep(3600)
    finally:
        time.sleep(3600)

async def wait_for_cluster(*_: object) -> None:
    await {name}()

exit_limit.STOP_SECONDS = 1.0
manager.wait_for_cluster = wait_for_cluster
program.main()
"""

SIGNAL_TO_KOPF = """
import asyncio, os, signal
from meshwright_operator import __main__ as program

install = asyncio.SelectorEventLoop.add_signal_handler

def add_signal_handler(loop, number, callback, *arguments):
    install(loop, number, callback, *arguments)
    if number == signal.SIGTERM and arguments:  # the operator's own handler has none
        print("kopf's handler", flush=True)
        os.kill(os.getpid(), number)

asyncio.SelectorEventLoop.add_signal_handler = add_signal_handler
program.main()
"""


WAITS = [
    ("deaf", "task operator at "),
    ("waits_for_a_thread", "thread asyncio_0 at "),
    ("blocks", "thread MainThread at <string>:"),
]


@pytest.mark.parametrize(("name", "says"), mostly_long(WAITS, lambda wait: wait[0] == "deaf"))
def test_what_never_ends_does_not_keep_the_process(tmp_path: Path, name: str, says: str) -> None:
    (tmp_path / "config").write_text(KUBECONFIG)
    flags = ["--metrics-listen", "127.0.0.1:0", "--coordinator-listen", "127.0.0.1:0", "--drain-seconds", "0"]
    command = [sys.executable, "-c", START.replace("{name}", name), "--log-format", "json", *flags]
    environment = {**os.environ, "KUBECONFIG": str(tmp_path / "config")}
    environment.pop("KUBERNETES_SERVICE_HOST", None)
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=patient(60))
    last = json.loads(errors.splitlines()[-1])
    assert process.returncode == 1
    assert (last["level"], last["message"], last["seconds"]) == ("error", "did not stop in time; exiting", 1.0)
    assert says in last["waits_for"]


async def test_a_signal_that_arrives_when_kopf_has_replaced_the_handlers_is_an_orderly_stop(
    api: Api, operators_token: str, tmp_path: Path
) -> None:
    kubeconfig = write_kubeconfig(tmp_path / "kubeconfig", api.url, operators_token)
    listen = ("--metrics-listen=127.0.0.1:0", "--coordinator-listen=127.0.0.1:0", "--tls=disabled")
    flags = (f"--kubeconfig={kubeconfig}", f"--key-file={tmp_path / 'key'}", *listen)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", SIGNAL_TO_KOPF, *flags), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    output, errors = await asyncio.wait_for(process.communicate(), patient(60))
    assert (process.returncode, output.decode()) == (0, "kopf's handler\n"), errors.decode()
    assert b"stopping" in errors


async def test_a_handover_that_fails_leaves_nothing_running(
    api: Api,
    kubelet: Kubelet,
    start_operator: StartOperator,
    settled: Settled,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is left would be cancelled all at once, and the tasks of a watch would wait for each other."""
    left: set[str] = set()
    run = manager.run

    async def watched(*arguments: object) -> None:
        try:
            await run(*arguments)  # type: ignore[arg-type]
        finally:
            left.update(task.get_name() for task in asyncio.all_tasks() if task is not asyncio.current_task())

    async def fails(recorder: EventRecorder, seconds: float) -> None:
        raise RuntimeError("no more events")

    monkeypatch.setattr("tests.operator.support.run", watched)
    monkeypatch.setattr(EventRecorder, "flush", fails)
    operator = await start_operator()
    await api.create(JOBS, job("left"))
    await settled("left")
    await operator.stop()
    assert isinstance(operator.failure, RuntimeError)
    assert left == set()


async def test_the_time_to_exit_begins_when_a_part_fails_and_not_when_all_have_ended(
    start_operator: StartOperator, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []

    async def fails(resync: Resync) -> None:
        while not told:  # noqa: ASYNC110 - the other part tells nobody
            await asyncio.sleep(0.01)
        raise RuntimeError("no more lists")

    async def ends_late(recorder: EventRecorder) -> None:
        told.append("begun")
        try:
            await asyncio.sleep(3600)
        finally:
            await asyncio.sleep(0)
            told.append("ended")

    async def telling(settings: Settings, stop: asyncio.Event, on_ready: Callable[[], None]) -> None:
        await manager.run(settings, stop, on_ready, lambda: told.append("failed"))

    monkeypatch.setattr("tests.operator.support.run", telling)
    monkeypatch.setattr(Resync, "run", fails)
    monkeypatch.setattr(EventRecorder, "run", ends_late)
    operator = await start_operator(wait=False)
    await until(lambda: _ended(operator), "it ends")
    assert list(dict.fromkeys(told)) == ["begun", "failed", "ended"]


async def _ended(operator: OperatorThread) -> bool:
    return not operator.alive
