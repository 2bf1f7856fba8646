"""A process that makes plans, one at a time: reads requests from its input and writes answers to its output.

It writes one byte when it is ready. From then on, `PREEMPT` ends the plan that is being made as its deadline would. It
limits its own CPU time and memory, so that the kernel stops it whatever a plan does. It ends when its input does, so it
does not outlive the operator by more than one plan.
"""

from __future__ import annotations

import os
import pickle
import resource
import signal
import sys
import time
from math import ceil
from typing import BinaryIO

from meshwright.planner.deadline import end_planning
from meshwright_operator.planning.request import solve

PREEMPT = signal.SIGUSR1
READY = b"\x01"

LENGTH_BYTES = 4
MEMORY_BYTES = 1 << 30
HARD_LIMIT_SECONDS = 1.0
"""CPU time after the deadline until the kernel kills the process."""


def main() -> None:
    """Serve until the input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # The operator stops its processes itself.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, resource.getrlimit(resource.RLIMIT_AS)[1]))
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # Whatever is printed must not reach the answers.
    signal.signal(PREEMPT, lambda *_: end_planning())
    answers.write(READY)
    answers.flush()
    serve(sys.stdin.buffer, answers)


def serve(requests: BinaryIO, answers: BinaryIO) -> None:
    """Answer requests until there are no more."""
    hard_limit = resource.getrlimit(resource.RLIMIT_CPU)[1]
    while len(header := requests.read(LENGTH_BYTES)) == LENGTH_BYTES:
        # Both ends are the operator's own.
        request, cpu_seconds = pickle.loads(requests.read(int.from_bytes(header, "big")))  # noqa: S301
        started = time.process_time()
        resource.setrlimit(resource.RLIMIT_CPU, (ceil(started + cpu_seconds + HARD_LIMIT_SECONDS), hard_limit))
        answer = pickle.dumps((solve(request, cpu_seconds), time.process_time() - started))
        answers.write(len(answer).to_bytes(LENGTH_BYTES, "big") + answer)
        answers.flush()


if __name__ == "__main__":
    main()
