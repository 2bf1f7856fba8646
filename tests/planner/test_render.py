"""The drawing of a placement."""

from __future__ import annotations

from meshwright.planner.placement import place
from meshwright.planner.plan import Plan
from meshwright.planner.render import render_placement, summary_line
from tests.planner.builders import inventory, node, plan_of, racks


def drawn(plan: Plan, nodes: list[dict[str, object]], **options: dict[str, int]) -> list[str]:
    placement = place(plan, inventory(*nodes))
    return render_placement(plan.to_status(), placement.to_status("lm", {}), **options)


def test_the_tree_shows_ranks_and_coordinates() -> None:
    assert drawn(plan_of(2, 2, 2, 2), racks(2, 2, 2)) == [
        "rack0",
        "├─ rack0-node0 w0   [0 d0p0t0] [1 d0p0t1]",
        "└─ rack0-node1 w1   [2 d0p1t0] [3 d0p1t1]",
        "rack1",
        "├─ rack1-node0 w2   [4 d1p0t0] [5 d1p0t1]",
        "└─ rack1-node1 w3   [6 d1p1t0] [7 d1p1t1]",
    ]


def test_unused_gpus_show_when_asked_and_wide_domains_are_named() -> None:
    nodes = [node(f"tray{i}", gpus=4, domain="nvl0") for i in range(2)]
    lines = drawn(plan_of(2, 1, 2, 2), nodes, gpus_by_node={"tray0": 5})
    assert lines[1] == "└─ tray0 w0,w1 [0 d0p0t0] [1 d0p0t1] [2 d1p0t0] [3 d1p0t1] [·]  NVLink nvl0"


def test_ranks_are_aligned_in_large_worlds() -> None:
    lines = drawn(plan_of(1, 1, 12, 4), racks(1, 2, 8))
    assert "[ 0 d0p0t0]" in lines[1]
    assert any("[11 d11p0t0]" in line for line in lines)


def test_one_line_says_what_the_drawing_says() -> None:
    plan = plan_of(2, 2, 2, 2)
    status = place(plan, inventory(*racks(2, 2, 2))).to_status("lm", {})
    line = summary_line(plan.to_status(), status)
    assert line == "TP 2 x PP 2 x DP 2: 8 ranks on 4 nodes in 2 racks, every replica inside one rack"
