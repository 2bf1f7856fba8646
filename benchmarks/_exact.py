"""The exact optimum of small placements by CP-SAT, and improvement of large ones by solving parts of them exactly.

The perimeter inequality of `meshwright.planner.placement.lower_bound` is given to the solver for every place (u <= a
* b);
without it CP-SAT does not prove 32 blocks in a minute.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ortools.sat.python import cp_model

from meshwright.planner.placement.problem import Problem


@dataclass(frozen=True, slots=True)
class Exact:
    """What the solver found: no placement costs less than `bound`; `bins` is the best it has, if any."""

    bound: float
    cost: float | None
    bins: list[int] | None
    proved: bool


def solve(problem: Problem, rows: int, columns: int, seconds: float, below: float, lower: float) -> Exact:
    """Looks for a placement that costs less than `below`, for so many seconds; blocks are numbered row by row.

    All weights must be whole numbers.
    """
    model = cp_model.CpModel()
    bins = range(len(problem.bins))
    at = [[model.new_bool_var(f"{block}@{j}") for j in bins] for block in range(problem.size)]
    for options in at:
        model.add_exactly_one(options)
    for j in bins:
        model.add(sum(options[j] for options in at) <= problem.bins[j].capacity)
    cost: list[Any] = []
    for level in range(problem.levels):
        cost += _level(model, problem, at, level, rows, columns)
    objective = sum(cost)
    model.add(objective <= int(below) - 1)
    model.add(objective >= int(lower))
    model.minimize(objective)
    _break_symmetry(model, at, rows, columns)
    return _run(model, at, seconds, below, lower)


def _level(
    model: cp_model.CpModel, problem: Problem, at: Sequence[Sequence[Any]], level: int, rows: int, columns: int
) -> list[Any]:
    """Cost terms of one level, with the perimeter inequality for each of its places."""
    members: defaultdict[int, list[int]] = defaultdict(list)
    for j, place in enumerate(problem.places[level]):
        members[place].append(j)
    terms: list[Any] = []
    for place, inside in members.items():
        touched: dict[str, list[Any]] = {"row": [], "column": []}
        for number, group in enumerate(problem.groups):
            uses = model.new_bool_var(f"group{number} in {place}")
            for block in group.blocks:
                for j in inside:
                    model.add_implication(at[block][j], uses)
            terms.append(int(group.weights[level]) * uses)
            same_row = group.blocks[0] // columns == group.blocks[1] // columns
            touched["row" if same_row else "column"].append(uses)
        if len(touched["row"]) == rows and len(touched["column"]) == columns:
            held = sum(at[block][j] for block in range(problem.size) for j in inside)
            _perimeter(model, held, sum(touched["row"]), sum(touched["column"]), rows)
    return [*terms, *(-int(group.weights[level]) for group in problem.groups)]


def _perimeter(model: cp_model.CpModel, held: Any, a: Any, b: Any, rows: int) -> None:
    for k in range(rows):
        at_most = model.new_bool_var("")
        model.add(a <= k).only_enforce_if(at_most)
        model.add(a >= k + 1).only_enforce_if(at_most.Not())
        model.add(held <= k * b).only_enforce_if(at_most)


def _break_symmetry(model: cp_model.CpModel, at: Sequence[Sequence[Any]], rows: int, columns: int) -> None:
    """Rows are interchangeable, and so are columns: their first blocks come in order of bins."""

    def number(block: int) -> Any:
        return sum((j + 1) * option for j, option in enumerate(at[block]))

    for row in range(rows - 1):
        model.add(number(row * columns) <= number((row + 1) * columns))
    for column in range(columns - 1):
        model.add(number(column) <= number(column + 1))


def _run(model: cp_model.CpModel, at: Sequence[Sequence[Any]], seconds: float, below: float, lower: float) -> Exact:
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = seconds
    solver.parameters.num_workers = 2
    status = solver.solve(model)
    if status == cp_model.INFEASIBLE:
        return Exact(below, None, None, proved=True)
    if status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        found = [next(j for j, option in enumerate(options) if solver.value(option)) for options in at]
        proved = status == cp_model.OPTIMAL
        return Exact(max(lower, solver.best_objective_bound), solver.objective_value, found, proved)
    return Exact(lower, None, None, proved=False)


def improve_part(problem: Problem, bins: Sequence[int], free: Sequence[int], seconds: float) -> list[int]:
    """The best assignment in which only blocks of the bins `free` move, and only among these; one worker."""
    chosen = set(free)
    moving = [block for block, j in enumerate(bins) if j in chosen]
    model = cp_model.CpModel()
    at: Mapping[int, Mapping[int, Any]] = {b: {j: model.new_bool_var("") for j in free} for b in moving}
    for block, options in at.items():
        model.add_exactly_one(options.values())
        for j, option in options.items():
            model.add_hint(option, int(bins[block] == j))
    for j in free:
        model.add(sum(options[j] for options in at.values()) <= problem.bins[j].capacity)
    terms = [
        term
        for index in sorted({i for block in moving for i in problem.groups_of[block]})
        for level in range(problem.levels)
        for term in _moving_cost(model, problem, bins, at, index, level)
    ]
    model.minimize(sum(terms))
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = seconds
    solver.parameters.num_workers = 1
    found = list(bins)
    if solver.solve(model) in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        for block, options in at.items():
            found[block] = next(j for j, option in options.items() if solver.value(option))
    return found


def _moving_cost(
    model: cp_model.CpModel,
    problem: Problem,
    bins: Sequence[int],
    at: Mapping[int, Mapping[int, Any]],
    index: int,
    level: int,
) -> list[Any]:
    """What a group pays at a level for places that only its moving blocks may touch."""
    group, places = problem.groups[index], problem.places[level]
    weight = int(group.weights[level])
    if not weight:
        return []
    held = {places[bins[block]] for block in group.blocks if block not in at}
    terms: list[Any] = []
    inside = [block for block in group.blocks if block in at]
    for place in {places[j] for j in at[inside[0]]} - held:
        uses = model.new_bool_var("")
        for block in inside:
            for j, option in at[block].items():
                if places[j] == place:
                    model.add_implication(option, uses)
        terms.append(weight * uses)
    return terms
