"""How far ranks are with work before their first step that may take hours, such as tokenizing text: for conditions.

Every worker tokenizes the text itself, every rank loads its part of the weights, and the last one decides when training
begins. The numbers come from a user's pod: those that make no sense are ignored.
"""

from __future__ import annotations

from meshwright.figures import format_decimal_bytes
from meshwright.protocol.messages import AgentState, RankWork
from meshwright.protocol.run_config import CommandRun
from meshwright_operator.decide.observed import Observed
from meshwright_operator.text import counted

_VERBS = {
    "list": "Listing the files of the data",
    "tokenize": "Tokenizing the data",
    "verify": "Verifying the checkpoint",
    "checkpoint": "Loading the checkpoint",
    "draw": "Drawing the initial weights",
    "adapter": "Loading the initial adapter",
    "weights": "Loading the initial weights",
}
"""By the name of the work, in the order in which ranks do it."""


def slowest_work(observed: Observed) -> str:
    """What the worker that is furthest behind is doing, how much of it is done, and how fast. Empty if none reports it.

    The message changes while they work. Like other progress, that is written every 10 s, within the budget of all jobs.
    """
    reports = observed.reports_in(AgentState.STARTING)
    if isinstance(observed.run, CommandRun):  # its ranks count as training from their start
        reports = reports | observed.reports_in(AgentState.RUNNING)
    behind = [
        (_progress(rank.work), worker, rank.work)
        for worker, received in sorted(reports.items())
        if received.fresh
        for rank in received.report.ranks
        if rank.exit_code is None and rank.work is not None and _is_plausible(rank.work)
        if received.report.state is AgentState.STARTING or is_at_work(rank.work)
    ]
    if not behind:
        return ""
    _, slowest, work = min(behind, key=lambda found: found[:2])
    workers = len({worker for _, worker, _ in behind})
    where = f"worker {slowest}, the slowest of {counted(workers, 'worker')}" if workers > 1 else f"worker {slowest}"
    return f"{describe(work)} on {where}"


def describe(work: RankWork | None) -> str:
    """What a rank is doing, how much of it is done, and how fast. Empty if it reports nothing that makes sense."""
    if work is None or not _is_plausible(work):
        return ""
    corpus = f", corpus {work.part} of {work.parts}" if work.parts > 1 else ""
    return f"{_VERBS[work.name]}{corpus}: {_amount(work)}"


def is_at_work(work: RankWork | None) -> bool:
    """Whether a rank has not completed the work that it reports. One that has waits for others."""
    return work is not None and work.done != work.total


def _is_plausible(work: RankWork) -> bool:
    total = work.total if work.total is not None else work.done
    return work.name in _VERBS and 0 <= work.done <= total and 1 <= work.part <= work.parts and 0 < work.seconds < 1e9  # noqa: PLR2004 - 30 years


def _progress(work: RankWork) -> tuple[int, float, float]:
    """How far a rank is, to compare it with others: the kind of work, the corpus, and the part of it."""
    return list(_VERBS).index(work.name), work.part, work.done / work.total if work.total else work.done


def _amount(work: RankWork) -> str:
    rate = work.done / work.seconds
    if work.name == "list":
        return f"{work.done:,} files at {rate:,.0f}/s"
    size = format_decimal_bytes(work.total or work.done)
    share = f"{int(100 * work.done / work.total)}% of {size}" if work.total else size
    return f"{share} at {format_decimal_bytes(rate)}/s"
