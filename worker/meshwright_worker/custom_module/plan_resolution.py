"""Resolves the names of a plan in a module and validates them, before anything is split.

Every parameter gets one role. If a parameter is used in several places, each assigns it a role, and these must be
equal.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from enum import Enum
from fnmatch import fnmatchcase
from typing import TypeVar

from torch import nn

from meshwright_worker.custom_module.plan import ParallelPlan, PlanError

Part = TypeVar("Part", bound=nn.Module)


class Role(Enum):
    """What a rank of a tensor group has of a parameter and of its gradient. The value completes a sentence that begins
    with "the plan".
    """

    WHOLE = "does not split"
    ROWS = "splits by rows"
    COLUMNS = "splits by columns"
    PARTIAL = "has summed from parts (`partial`, or the bias of a `row` layer)"


@dataclass(frozen=True)
class ResolvedPlan:
    """A module's parts by the entries that name them. A part with several names is listed under the first of them."""

    regions: Mapping[str, nn.Module]
    column: Mapping[str, nn.Linear]
    row: Mapping[str, nn.Linear]
    gathered: Mapping[str, nn.Linear]
    vocabulary: Mapping[str, nn.Embedding]
    blocks: Mapping[str, nn.Module]
    roles: Mapping[str, Role]
    """Of each parameter, under each of its names."""


def resolve(module: nn.Module, plan: ParallelPlan) -> ResolvedPlan:
    """Return the parts that a plan names. A pure function of the module's structure.

    Raises:
        PlanError: an entry names nothing or a module of another kind, entries contradict each other, or the gradient of
            a remaining parameter would be wrong.
    """
    modules = {name: part for name, part in module.named_modules(remove_duplicate=False) if name}
    regions = _match_modules(modules, plan.regions, nn.Module, "regions")
    column = _match_modules(modules, plan.column, nn.Linear, "column")
    row = _match_modules(modules, plan.row, nn.Linear, "row")
    gathered = _match_modules(modules, plan.gathered, nn.Linear, "gathered")
    vocabulary = _match_modules(modules, plan.vocabulary, nn.Embedding, "vocabulary")
    blocks = _match_modules(modules, plan.blocks, nn.Module, "blocks")
    _check_regions(regions, column, row)
    region_index = _RegionIndex(modules, regions)
    region_index.check(column, "column", must_be_inside=True)
    region_index.check(row, "row", must_be_inside=True)
    region_index.check(gathered, "gathered", must_be_inside=False)
    region_index.check(vocabulary, "vocabulary", must_be_inside=False)
    _check_split(modules, {"column": column, "row": row, "gathered": gathered, "vocabulary": vocabulary})
    for name, block in blocks.items():
        if type(block).forward is nn.Module.forward:
            raise PlanError(
                f"`blocks`: `{name}` is a {type(block).__name__}, which is never called itself: name the modules in it"
            )
    by_rows, by_columns = {**column, **gathered, **vocabulary}, row
    roles = _roles(module, _partial(module, modules, plan.partial), by_rows, by_columns, region_index)
    _check_ties(module, roles)
    return ResolvedPlan(
        _by_first_name(regions),
        _by_first_name(column),
        _by_first_name(row),
        _by_first_name(gathered),
        _by_first_name(vocabulary),
        _by_first_name(blocks),
        roles,
    )


def matches(name: str, pattern: str) -> bool:
    """Return whether a pattern matches a name."""
    names, patterns = name.split("."), pattern.split(".")
    return len(names) == len(patterns) and all(map(fnmatchcase, names, patterns))


class _RegionIndex:
    """The parts that are in regions, by all of their names."""

    def __init__(self, modules: Mapping[str, nn.Module], regions: Mapping[str, nn.Module]) -> None:
        split = {id(region) for region in regions.values()}
        self._regions = [name for name, part in modules.items() if id(part) in split]
        self._names: dict[int, list[str]] = {}
        for name, part in modules.items():
            self._names.setdefault(id(part), []).append(name)

    def region_of(self, name: str) -> str | None:
        """Return the region that contains the named part."""
        return next((region for region in self._regions if name.startswith(f"{region}.")), None)

    def check(self, matched: Mapping[str, nn.Module], field: str, *, must_be_inside: bool) -> None:
        """Raise `PlanError` for parts that are in a region and must not be, or the reverse."""
        for part in matched.values():
            for name in self._names[id(part)]:
                region = self.region_of(name)
                if must_be_inside and region is None:
                    raise PlanError(f"`{field}`: `{name}` is in no region: name the sub-layer it is in under `regions`")
                if region is not None and not must_be_inside:
                    raise PlanError(
                        f"`{field}`: `{name}` is in the region `{region}`: name only modules outside of regions"
                    )


def _match_modules(
    modules: Mapping[str, nn.Module], patterns: tuple[str, ...], kind: type[Part], field: str
) -> dict[str, Part]:
    matched: dict[str, Part] = {}
    for pattern in patterns:
        named = [name for name in modules if matches(name, pattern)]
        if not named:
            raise PlanError(f"`{field}`: no module is called `{pattern}`{_suggest(pattern, modules)}")
        for name in named:
            part = modules[name]
            if not isinstance(part, kind):
                raise PlanError(f"`{field}`: `{name}` is a {type(part).__name__}, not a {kind.__name__}")
            matched[name] = part
    return matched


def _suggest(pattern: str, names: Iterable[str]) -> str:
    known = list(names)
    # Inside another module, as torch.compile, DistributedDataParallel and many models have it.
    outer = (name.split(".")[: -len(pattern.split("."))] for name in known)
    inside = dict.fromkeys(".".join([*path, pattern]) for path in outer if path)
    suggestions = [one for one in inside if any(matches(name, one) for name in known)][:3]
    suggestions = suggestions or get_close_matches(pattern, known, n=3)
    return f"; there is `{'`, `'.join(suggestions)}`" if suggestions else ""


def _by_first_name(matched: Mapping[str, Part]) -> dict[str, Part]:
    first: dict[int, str] = {}
    for name, part in matched.items():
        first.setdefault(id(part), name)
    return {name: matched[name] for name in first.values()}


def _check_regions(
    regions: Mapping[str, nn.Module], column: Mapping[str, nn.Linear], row: Mapping[str, nn.Linear]
) -> None:
    for name, region in regions.items():
        within = {id(part) for part in region.modules() if part is not region}
        for other, inner in regions.items():
            if id(inner) in within:
                raise PlanError(f"`regions`: `{other}` is in `{name}`, whose outputs are summed: name one of them")
        for field, matched in (("column", column), ("row", row)):
            if not any(id(part) in within for part in matched.values()):
                raise PlanError(
                    f"`regions`: `{name}` has no `{field}` layer, so its outputs are not parts of a sum: name one, or "
                    "leave the region out"
                )


def _check_split(modules: Mapping[str, nn.Module], entries: Mapping[str, Mapping[str, nn.Module]]) -> None:
    """Check that the layers to be split compute what the split layers will."""
    field_of: dict[int, str] = {}
    for field, matched in entries.items():
        kind = nn.Embedding if field == "vocabulary" else nn.Linear
        for name, part in matched.items():
            other = field_of.setdefault(id(part), field)
            if other != field:
                raise PlanError(f"`{name}` is named by `{other}` and by `{field}`: it can be split in only one way")
            if type(part).forward is not kind.forward or "forward" in vars(part) or "weight" not in part._parameters:
                raise PlanError(
                    f"`{field}`: `{name}` is a {type(part).__name__} whose own computation a split "
                    f"{kind.__name__} would not do: use a plain {kind.__name__}, or do not split it"
                )
            _check_parent(modules, name, field)
            if isinstance(part, nn.Embedding):
                _check_table(name, part)


def _check_parent(modules: Mapping[str, nn.Module], name: str, field: str) -> None:
    while name:
        name = name.rpartition(".")[0]
        if isinstance(modules.get(name), nn.MultiheadAttention):
            raise PlanError(
                f"`{field}`: `{name}` is an nn.MultiheadAttention, which reads its layers' weights itself: write "
                "attention with nn.Linear layers and `scaled_dot_product_attention`"
            )


def _check_table(name: str, table: nn.Embedding) -> None:
    for option in ("max_norm", "scale_grad_by_freq", "sparse"):
        if getattr(table, option):
            raise PlanError(
                f"`vocabulary`: `{name}` has `{option}`, which a split table does not support: do not split it"
            )


def _partial(module: nn.Module, modules: Mapping[str, nn.Module], patterns: tuple[str, ...]) -> set[str]:
    names = [name for name, _ in module.named_parameters(remove_duplicate=False)]
    matched: set[str] = set()
    for pattern in patterns:
        parts = [name for name in modules if matches(name, pattern)]
        matching_parameters = [name for name in names if matches(name, pattern)]
        if not parts and not matching_parameters:
            raise PlanError(f"`partial`: no module or parameter is called `{pattern}`{_suggest(pattern, modules)}")
        matched.update(matching_parameters)
        matched.update(name for name in names for part in parts if name.startswith(f"{part}."))
    return matched


def _roles(
    module: nn.Module,
    partial: set[str],
    by_rows: Mapping[str, nn.Module],
    by_columns: Mapping[str, nn.Module],
    region_index: _RegionIndex,
) -> dict[str, Role]:
    rows, columns = ({id(part) for part in matched.values()} for matched in (by_rows, by_columns))
    roles = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        path, _, leaf = name.rpartition(".")
        owner, region = id(module.get_submodule(path)), region_index.region_of(name)
        if owner in rows or owner in columns:
            if name in partial:
                raise PlanError(
                    f"`partial`: `{name}` is split by another entry: name only parameters that no entry splits"
                )
            if owner in rows:
                roles[name] = Role.ROWS
            else:
                roles[name] = Role.COLUMNS if leaf == "weight" else Role.PARTIAL
        elif name in partial:
            if region is None:
                raise PlanError(
                    f"`partial`: `{name}` is outside of regions, where gradients are already complete: leave it out"
                )
            roles[name] = Role.PARTIAL
        elif region is not None and parameter.requires_grad:
            raise PlanError(
                f"`{name}` is in the region `{region}`, where a rank has a part of its gradient, but no entry names "
                "it: add it to `partial`, or name its layer under `column` or `row`"
            )
        else:
            roles[name] = Role.WHOLE
    return roles


def _check_ties(module: nn.Module, roles: Mapping[str, Role]) -> None:
    first: dict[int, str] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        other = first.setdefault(id(parameter), name)
        if roles[name] is not roles[other]:
            raise PlanError(
                f"`{other}` and `{name}` are one parameter, which the plan {roles[other].value} in the first place and "
                f"{roles[name].value} in the second: name both modules in entries that split in the same way "
                "(`vocabulary`, `gathered` and `column` split by rows), or make them two parameters"
            )
