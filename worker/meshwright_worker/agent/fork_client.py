"""The agent's side of the fork server: starts it, requests forks of ranks, receives their exits."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
from collections.abc import Callable, Mapping

from meshwright.protocol.run_config import NativeRun
from meshwright_worker.agent.rank_process import Pipe, RankHandle, open_command_pipe, open_pipe, signal_process
from meshwright_worker.agent.server_process import RUNTIME_MODULE, ServerProcess
from meshwright_worker.rank.fork_server import MAX_MESSAGE, encode_request, encode_store_request
from meshwright_worker.rank.rank_main import DUMP_STACKS, REQUEST_CHECKPOINT
from meshwright_worker.rank.task import RankTask

log = logging.getLogger(__name__)

PRELOAD_SECONDS = 600.0
"""Limit for the import of torch. From an image that is loaded as it is read, or on a busy node, it takes minutes. To
begin again would only take longer. The operator's limit for hangs before the first step is higher.
"""
FORK_SECONDS = 30.0
STOP_SECONDS = 2.0
_KILLED = -signal.SIGKILL


class ForkServerError(Exception):
    """The fork server failed or timed out; the next generation starts a new one."""


class ForkServerClient:
    """One fork server process. `start` returns at once: the server imports torch in the background."""

    def __init__(
        self, environment: Mapping[str, str], module: str = RUNTIME_MODULE, started: ServerProcess | None = None
    ) -> None:
        """`started` is a server that was started already, with the same environment and module."""
        self._environment = dict(environment)
        self._module = module
        self._started = started
        self._process: ServerProcess | None = None
        self._channel: socket.socket | None = None
        self._reader: asyncio.Task[None] | None = None
        self._ready: asyncio.Future[float] | None = None
        self._fork_reply: asyncio.Future[int] | None = None
        self._exits: dict[int, asyncio.Future[int]] = {}

    async def start(self) -> None:
        """Start the process, unless it is running."""
        if self._process is not None and self._process.running and self._channel is not None:
            return
        await self.stop()
        self._process = self._started or ServerProcess.start(self._environment, self._module)
        self._started, self._channel = None, self._process.channel
        self._ready = asyncio.get_running_loop().create_future()
        self._reader = asyncio.create_task(self._listen(self._channel, self._ready))

    @property
    def importing(self) -> bool:
        """Whether the server still imports torch."""
        return self._ready is not None and not self._ready.done()

    async def imported(self) -> None:
        """Wait until the server has imported torch, or has failed to. Returns at once if it was not started."""
        if self._ready is not None:
            await asyncio.wait([self._ready])

    async def ready(self) -> None:
        """Start the server if it is not running, and wait until it has imported torch.

        Raises:
            ForkServerError: it exited or timed out.
        """
        await self.start()
        assert self._ready is not None
        try:
            async with asyncio.timeout(PRELOAD_SECONDS):
                await asyncio.shield(self._ready)
        except TimeoutError:
            await self.stop()
            raise ForkServerError(f"the training runtime was not imported within {PRELOAD_SECONDS:g} s") from None

    async def fork(self, task: RankTask[NativeRun], environment: Mapping[str, str]) -> RankHandle:
        """Fork the process of one rank once the server is ready. One call at a time.

        Raises:
            ForkServerError: the server exited or does not answer.
        """
        await self.ready()
        assert self._channel is not None
        request = encode_request(task, environment)
        with contextlib.ExitStack() as cleanup:
            try:
                events, events_write = await open_pipe()
                cleanup.callback(events.close)
                output, output_write = await open_pipe()
                cleanup.callback(output.close)
                stacks, stacks_write = await open_pipe()
                cleanup.callback(stacks.close)
                commands, commands_read = await open_command_pipe()
                cleanup.callback(commands.close)
                pid = await self._request(request, [events_write, output_write, stacks_write, commands_read])
            except (TimeoutError, OSError) as error:
                await self.stop()
                raise ForkServerError(
                    f"cannot fork rank {task.rank}: {error or 'the fork server does not answer'}"
                ) from error
            cleanup.pop_all()
        return self._handle_for(task.rank, pid, output, events, stacks, commands)

    async def fork_store(self, port: int, ranks: int) -> Callable[[], None]:
        """Fork a process that keeps the store of a generation. Return a function that kills it.

        Raises:
            ForkServerError: the server exited or does not answer.
        """
        await self.ready()
        try:
            pid = await self._request(encode_store_request(port, ranks), [])
        except (TimeoutError, OSError) as error:
            await self.stop()
            raise ForkServerError(f"cannot fork a store: {error or 'the fork server does not answer'}") from error
        exit_code = self._exits[pid]
        exit_code.add_done_callback(lambda _: self._exits.pop(pid, None))
        return lambda: None if exit_code.done() else signal_process(pid, signal.SIGKILL)

    async def _request(self, request: bytes, descriptors: list[int]) -> int:
        """Send a request with descriptors, which are closed here, and return the process id of the fork."""
        assert self._channel is not None
        self._fork_reply = asyncio.get_running_loop().create_future()
        try:
            socket.send_fds(self._channel, [request], descriptors)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        async with asyncio.timeout(FORK_SECONDS):
            return await self._fork_reply

    async def stop(self) -> None:
        """Stop the server, and with it every rank that it forked."""
        if self._process is not None and self._process.running:
            self._process.kill()
            await self._process.wait()
        if self._reader is not None:
            await asyncio.wait([self._reader], timeout=STOP_SECONDS)
            self._reader.cancel()
        if self._channel is not None:
            self._channel.close()
        self._process = self._reader = self._channel = None

    async def _exit_reason(self) -> str:
        if self._process is None:
            return "it was stopped"
        try:
            async with asyncio.timeout(STOP_SECONDS):
                code = await self._process.wait()
        except TimeoutError:
            return "it closed its channel"
        return f"killed by signal {-code}" if code < 0 else f"exit code {code}, see the pod's log"

    def _handle_for(
        self, rank: int, pid: int, output: Pipe, events: Pipe, stacks: Pipe, commands: asyncio.WriteTransport
    ) -> RankHandle:
        exit_code = self._exits[pid]

        async def wait() -> int:
            code = await asyncio.shield(exit_code)
            self._exits.pop(pid, None)
            return code

        def send(number: int) -> None:
            if not exit_code.done():
                signal_process(pid, number)

        return RankHandle(
            rank=rank,
            pid=pid,
            wait=wait,
            terminate=lambda: send(signal.SIGTERM),
            kill=lambda: send(signal.SIGKILL),
            output=output,
            events=events,
            request_checkpoint=lambda: send(REQUEST_CHECKPOINT),
            dump_stacks=lambda: send(DUMP_STACKS),
            stacks=stacks,
            commands=commands,
        )

    async def _listen(self, channel: socket.socket, ready: asyncio.Future[float]) -> None:
        loop = asyncio.get_running_loop()
        error_text = ""
        with contextlib.suppress(OSError):
            while data := await loop.sock_recv(channel, MAX_MESSAGE):
                match json.loads(data):
                    case {"ready": seconds}:
                        log.info("ready to fork ranks: torch imported in %.1f s", seconds)
                        ready.set_result(seconds)
                    case {"pid": pid}:
                        self._exits[pid] = loop.create_future()
                        if self._fork_reply is not None and not self._fork_reply.done():
                            self._fork_reply.set_result(pid)
                    case {"exited": pid, "code": code} if pid in self._exits:
                        self._exits[pid].set_result(code)
                    case {"failed": text}:
                        error_text = text
        # The server exited, and the kernel has killed every rank with it.
        error = ForkServerError(f"the fork server exited: {error_text or await self._exit_reason()}")
        for waiting in (ready, self._fork_reply):
            if waiting is not None and not waiting.done():
                waiting.set_exception(error)
                waiting.exception()
        for exit_code in self._exits.values():
            if not exit_code.done():
                exit_code.set_result(_KILLED)
