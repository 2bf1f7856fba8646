"""CEL expressions as trees: what the cost of a rule is estimated on, which the engine does not show.

Only expressions that the engine has compiled come here, so that the grammar may be read leniently (CEL specification,
section "Syntax"). Macros stay calls: `self.items.all(x, p)` has the name `all`, a target and two arguments.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_TOKEN = re.compile(
    r"""
    (?P<space>\s+|//[^\n]*)
    | (?P<string>[rRbB]{0,2}(?:\"{3}(?:\\.|[^\\])*?\"{3}|'{3}(?:\\.|[^\\])*?'{3}|"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*'))
    | (?P<number>0[xX][0-9a-fA-F]+[uU]?|(?:\d+\.\d+|\.\d+|\d+)(?:[eE][+-]?\d+)?[uU]?)
    | (?P<name>[A-Za-z_]\w*|`[^`]*`)
    | (?P<sign>\|\||&&|[<>=!]=|[-+*/%<>!?:.,()\[\]{}])
    """,
    re.VERBOSE | re.DOTALL,
)
_LEVELS = (("||",), ("&&",), ("<", "<=", ">", ">=", "==", "!=", "in"), ("+", "-"), ("*", "/", "%"))


@dataclass(frozen=True, slots=True)
class Node:
    """One place of an expression.

    `kind` is const, name, select, call, list or map; operators are calls of their sign, `a[b]` of `[]` and
    `a ? b : c` of `?:`. `name` is that of the name, field or function, and the text of a constant.
    """

    kind: str
    name: str = ""
    args: tuple[Node, ...] = ()
    target: Node | None = None


def parse_expression(source: str) -> Node:
    """The tree of an expression.

    Raises:
        ValueError: it is not one.
    """
    reader = _Reader(source)
    node = reader.expression()
    if reader.peek():
        raise ValueError(f"unexpected {reader.peek()!r}")
    return node


class _Reader:
    def __init__(self, source: str) -> None:
        self._tokens: list[tuple[str, str]] = []
        at = 0
        while at < len(source):
            match = _TOKEN.match(source, at)
            if match is None or match.lastgroup is None:
                raise ValueError(f"unexpected character {source[at]!r}")
            if match.lastgroup != "space":
                self._tokens.append((match.lastgroup, match.group()))
            at = match.end()
        self._at = 0

    def peek(self) -> str:
        return self._tokens[self._at][1] if self._at < len(self._tokens) else ""

    def expression(self) -> Node:
        condition = self._binary(0)
        if not self._take("?"):
            return condition
        yes = self._binary(0)
        self._need(":")
        return Node("call", "?:", (condition, yes, self.expression()))

    def _take(self, sign: str) -> bool:
        if self.peek() == sign and self._tokens[self._at][0] != "string":
            self._at += 1
            return True
        return False

    def _need(self, sign: str) -> None:
        if not self._take(sign):
            raise ValueError(f"expected {sign!r}, not {self.peek()!r}")

    def _next(self) -> tuple[str, str]:
        if self._at == len(self._tokens):
            raise ValueError("the expression ends too early")
        self._at += 1
        return self._tokens[self._at - 1]

    def _binary(self, level: int) -> Node:
        if level == len(_LEVELS):
            return self._unary()
        left = self._binary(level + 1)
        while (sign := next((s for s in _LEVELS[level] if self._take(s)), None)) is not None:
            left = Node("call", sign, (left, self._binary(level + 1)))
        return left

    def _unary(self) -> Node:
        for sign in ("!", "-"):
            if self._take(sign):
                return Node("call", sign, (self._unary(),))
        return self._member()

    def _member(self) -> Node:
        node = self._primary()
        while True:
            if self._take("."):
                self._take("?")
                _, name = self._next()
                if self._take("("):
                    node = Node("call", name, self._list(")"), node)
                else:
                    node = Node("select", name, target=node)
            elif self._take("["):
                self._take("?")
                node = Node("call", "[]", (node, self.expression()))
                self._need("]")
            else:
                return node

    def _primary(self) -> Node:
        if self._take("("):
            node = self.expression()
            self._need(")")
            return node
        if self._take("["):
            return Node("list", args=self._list("]"))
        if self._take("{"):
            return Node("map", args=self._list("}"))
        self._take(".")
        group, text = self._next()
        if group in ("string", "number") or text in ("true", "false", "null"):
            return Node("const", text)
        if group != "name":
            raise ValueError(f"unexpected {text!r}")
        return Node("call", text, self._list(")")) if self._take("(") else Node("name", text)

    def _list(self, end: str) -> tuple[Node, ...]:
        """Items up to a closing sign; of a map, keys and values in turn."""
        items: list[Node] = []
        while not self._take(end):
            self._take("?")
            items.append(self.expression())
            if not (self._take(",") or self._take(":")) and self.peek() != end:
                raise ValueError(f"expected {end!r}, not {self.peek()!r}")
        return tuple(items)
