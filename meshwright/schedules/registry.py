"""Schedules by name."""

from __future__ import annotations

from meshwright.schedules.actions import Schedule
from meshwright.schedules.classic import gpipe, interleaved, looped_bfs, naive, one_f_one_b
from meshwright.schedules.dual_pipe import dual_pipe, dual_pipe_v
from meshwright.schedules.zero_bubble import zb_h1, zb_h2, zb_v

NAMES = ("naive", "gpipe", "1f1b", "interleaved", "looped-bfs", "zb-h1", "zb-h2", "zb-v", "dualpipe", "dualpipe-v")


def generate(name: str, ranks: int, micro_batches: int, chunks: int = 1) -> Schedule:
    """The schedule called `name`.

    Args:
        name: one of `NAMES`.
        ranks: pipeline ranks.
        micro_batches: of one step.
        chunks: stages of one rank, where the schedule lets one choose: `interleaved` and `looped-bfs`.

    Raises:
        ValueError: the name is not known, or the schedule cannot be made for these numbers; the text says why.
    """
    simple = {
        "naive": naive,
        "gpipe": gpipe,
        "1f1b": one_f_one_b,
        "zb-h1": zb_h1,
        "zb-h2": zb_h2,
        "zb-v": zb_v,
        "dualpipe": dual_pipe,
        "dualpipe-v": dual_pipe_v,
    }
    if name in simple:
        return simple[name](ranks, micro_batches)
    if name == "interleaved":
        return interleaved(ranks, micro_batches, chunks)
    if name == "looped-bfs":
        return looped_bfs(ranks, micro_batches, chunks)
    raise ValueError(f"no schedule is called `{name}`: known are {', '.join(NAMES)}")
