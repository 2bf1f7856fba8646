"""What a CEL rule can cost at worst, so that a definition whose rules are too dear is refused as a real server does.

Follows cel-go's `checker/cost.go` and the Kubernetes extension of it: an operation costs 1, going over a string a tenth
of its length, a comprehension its body times the size of what it goes over. The limits are those of the API server:
ten million for one expression in all places where it applies, a hundred million for one schema.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from meshwright.local.apiserver.schema.cel_sizes import KEY, Schema, child_of, element_of, size_of
from meshwright.local.apiserver.schema.cel_syntax import Node, parse_expression

EXPRESSION_LIMIT = 10_000_000
SCHEMA_LIMIT = 100_000_000

_TRAVERSAL, _REGEX = 0.1, 0.25
_LIST, _MAP = 10, 30
_STEPS = {"all": 3, "exists": 4, "exists_one": 2, "map": 12, "filter": 13}
_COMPREHENSIONS = frozenset(_STEPS)
_TEXT = frozenset({"lowerAscii", "upperAscii", "trim", "substring", "quote", "reverse", "format", "findAll"})
_TWICE = frozenset({"split", "replace"})
_WHOLE = frozenset({"isSorted", "sum", "min", "max", "indexOf", "lastIndexOf"})
_SCALAR_SIGNS = frozenset({"!", "-", "*", "/", "%", "<", "<=", ">", ">=", "==", "!=", "in", "&&", "||"})
_SCALAR_CALLS = frozenset({"size", "int", "double", "uint", "bool", "has", "timestamp", "duration", "type"})


@dataclass(frozen=True, slots=True)
class _Estimate:
    cost: float
    size: float = math.inf
    """Of the value; infinite when nothing is known of it."""
    schema: Schema | None = None
    """Of the value, when it is a place of the object."""


def estimate(source: str, schema: Schema) -> float:
    """The highest cost of an expression with `self` (and `oldSelf`) of this schema; 0 for one that does not parse."""
    try:
        tree = parse_expression(source)
    except ValueError:
        return 0.0
    self_ = _Estimate(1, size_of(schema), schema)
    return _Estimator({"self": self_, "oldSelf": self_}).of(tree).cost


class _Estimator:
    def __init__(self, names: dict[str, _Estimate]) -> None:
        self._names = names

    def of(self, node: Node) -> _Estimate:
        if node.kind == "const":
            return _Estimate(0, _constant_size(node.name))
        if node.kind == "name":
            return self._names.get(node.name, _Estimate(1))
        if node.kind == "select":
            return self._select(node)
        if node.kind in ("list", "map"):
            cost = sum(self.of(arg).cost for arg in node.args)
            return _Estimate(cost + (_LIST if node.kind == "list" else _MAP), len(node.args))
        return self._call(node)

    def _select(self, node: Node) -> _Estimate:
        target = self.of(node.target) if node.target else _Estimate(0)
        return _place(target.cost + 1, child_of(target.schema, node.name))

    def _call(self, node: Node) -> _Estimate:
        name = node.name
        if name == "has" and node.target is None and node.args and node.args[0].target is not None:
            return _Estimate(self.of(node.args[0].target).cost, 1)
        if name in _COMPREHENSIONS and node.target is not None and len(node.args) >= 2:
            return self._comprehension(node, self.of(node.target))
        target = [self.of(node.target)] if node.target is not None else []
        args = target + [self.of(arg) for arg in node.args]
        spent = sum(arg.cost for arg in args)
        if name == "?:":
            condition, yes, no = args
            return _Estimate(condition.cost + max(yes.cost, no.cost), max(yes.size, no.size))
        if name == "[]":
            return _place(spent + 1, element_of(args[0].schema))
        if name in ("&&", "||"):
            return _Estimate(spent, 1)
        if name == "+":
            size = args[0].size + args[1].size
            return _Estimate(spent + (1 if _is_number(args) else _part(size)), size)
        return self._function(name, args, spent)

    def _function(self, name: str, args: list[_Estimate], spent: float) -> _Estimate:
        sizes = [arg.size for arg in args]
        first, last = (sizes[0], sizes[-1]) if sizes else (0.0, 0.0)
        costs: dict[str, Callable[[], float]] = {
            "==": lambda: _part(min(sizes)),
            "!=": lambda: _part(min(sizes)),
            "in": lambda: 1.0 if _is_map(args[-1]) else last,
            "startsWith": lambda: _part(last),
            "endsWith": lambda: _part(last),
            "contains": lambda: _part(first) * _part(last),
            "matches": lambda: _part(first + 1) * _part(last, _REGEX),
            "find": lambda: _part(first + 1) * _part(last, _REGEX),
        }
        cost = costs[name]() if name in costs else 1.0
        size = math.inf
        if name in _TEXT or name in _TWICE:
            cost, size = _part(first) * (2 if name in _TWICE else 1), first
        elif name == "string" and args[0].schema is not None and not _is_number(args):
            cost, size = _part(first), first
        elif name in ("join", *_WHOLE):
            cost, size = self._of_elements(name, args)
        elif name in ("contains", "intersects", "equivalent") and len(args) == 3:
            # `sets.contains(a, b)`: the first argument is the name of the extension.
            cost = _product(sizes[1], sizes[2]) * (2 if name == "equivalent" else 1)
        elif name in _SCALAR_SIGNS or name in _SCALAR_CALLS:
            size = 1
        return _Estimate(spent + cost, size, args[0].schema if name in ("value", "orValue") else None)

    def _of_elements(self, name: str, args: list[_Estimate]) -> tuple[float, float]:
        """Cost and size of the result of what looks into every element of a list, or at every place of a text."""
        whole, element = args[0], element_of(args[0].schema)
        each = size_of(element) if element is not None else 0.0
        if name == "join":
            text = _product(whole.size, each) + _product(whole.size, args[1].size if len(args) > 1 else 0.0)
            return _part(text), text
        if name in ("indexOf", "lastIndexOf") and element is None:
            return _product(_part(whole.size), _part(args[1].size)), 1.0
        return _product(whole.size, max(1.0, _part(each))), 1.0

    def _comprehension(self, node: Node, over: _Estimate) -> _Estimate:
        variable, body = node.args[0].name, node.args[1:]
        below = KEY if _is_map(over) else element_of(over.schema)
        # Elements of a list that was made in the expression count as if they had no length.
        of_one = _Estimate(1, 0) if over.schema is None else _place(1, below)
        inner = _Estimator({**self._names, variable: of_one})
        each = sum(inner.of(part).cost for part in body) + _STEPS[node.name]
        start = _LIST if node.name in ("map", "filter") else 0
        kept = replace(over, cost=over.cost + start + _product(over.size, each) + 1)
        if node.name in ("map", "filter"):
            return replace(kept, schema=over.schema if node.name == "filter" and not _is_map(over) else None)
        return replace(kept, size=1, schema=None)


def _place(cost: float, schema: Schema | None) -> _Estimate:
    return _Estimate(cost, size_of(schema) if schema is not None else math.inf, schema)


def _constant_size(text: str) -> float:
    return float(len(text.strip("rRbB\"'"))) if text[-1] in "\"'" else 1.0


def _is_map(value: _Estimate) -> bool:
    return value.schema is not None and value.schema.get("type") == "object"


def _is_number(args: list[_Estimate]) -> bool:
    kinds = {arg.schema.get("type") for arg in args if arg.schema is not None}
    return bool(kinds & {"integer", "number", "boolean"}) or all(arg.size == 1 for arg in args)


def _part(size: float, factor: float = _TRAVERSAL) -> float:
    return size if size == math.inf else math.ceil(size * factor)


def _product(a: float, b: float) -> float:
    return 0.0 if 0 in (a, b) else a * b
