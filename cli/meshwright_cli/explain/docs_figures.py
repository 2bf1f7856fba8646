"""The figures of the documentation: `python -m meshwright_cli.explain.docs_figures` writes them to `docs/images`."""

from __future__ import annotations

from pathlib import Path

from meshwright.models.presets import PRESETS
from meshwright.planner.cost.accelerators import accelerator
from meshwright_cli.explain.allreduce import ring, ring_figure
from meshwright_cli.explain.memory import memory_cases, memory_figure
from meshwright_cli.explain.schedule import KINDS, summary, timeline
from meshwright_cli.figures.schedule_figure import schedule_figure
from meshwright_cli.figures.svg import to_file

DIRECTORY = Path("docs/images")
SCHEDULES = ("GPipe", "1F1B", "Interleaved1F1B", "ZBH1", "ZBV", "DualPipeV")
RANKS, MICRO_BATCHES = 4, 8


def figures() -> dict[str, str]:
    """Return the content of each file by name."""
    return {
        **{f"schedule-{name.lower()}.svg": _schedule(name) for name in SCHEDULES},
        "memory-of-a-rank.svg": _memory(),
        "ring-all-reduce.svg": to_file(
            ring_figure(
                ring(4), "Ring all-reduce of four ranks: the number of summed values in each chunk after each step"
            )
        ),
    }


def _schedule(name: str) -> str:
    made, simulation = timeline(KINDS[name], RANKS, MICRO_BATCHES)
    title = f"{name} with {RANKS} ranks and {MICRO_BATCHES} micro-batches. {summary(KINDS[name], simulation)}"
    return to_file(schedule_figure(made, simulation, title, width=860, with_legend=True))


def _memory() -> str:
    gpu = accelerator("NVIDIA-H100-80GB-HBM3")
    assert gpu is not None
    groups = memory_cases(PRESETS["llama-3-8b"], 8, 8192, gpu)
    title = "Memory of one of 8 ranks that train llama-3-8b with sequences of 8,192 tokens, by kind"
    return to_file(memory_figure(groups, gpu.memory, title))


def main() -> None:
    """Write all files."""
    DIRECTORY.mkdir(parents=True, exist_ok=True)
    for name, content in figures().items():
        (DIRECTORY / name).write_text(content, encoding="utf-8")


if __name__ == "__main__":
    main()
