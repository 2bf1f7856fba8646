"""Docstrings of fields: the string after a field in its class. JSON schemas have them as the field's description.

pydantic reads them too, but whenever a class is defined: a third of the time that a process takes to import the API.
"""

from __future__ import annotations

import ast
import inspect
import sys
from functools import cache

from pydantic import BaseModel

_Block = ast.Module | ast.ClassDef | ast.FunctionDef


def field_docstrings(model: type[BaseModel]) -> dict[str, str]:
    """The docstring of each field of a class, by name; fields that it inherits have those of its bases."""
    found: dict[str, str | None] = {}
    for base in reversed(model.__mro__):
        if base not in (BaseModel, object):
            found |= _in_module(base.__module__).get(base.__qualname__, {})
    return {name: text for name, text in found.items() if text is not None and name in model.model_fields}


@cache
def _in_module(name: str) -> dict[str, dict[str, str | None]]:
    """The docstrings of fields of each class, by qualified name; none if the module's source is not there."""
    module = sys.modules.get(name)
    try:
        tree = ast.parse(inspect.getsource(module)) if module else ast.Module([], [])
    except (OSError, TypeError):
        return {}
    return dict(_in_body(tree, ""))


def _in_body(parent: _Block, prefix: str) -> list[tuple[str, dict[str, str | None]]]:
    found = []
    for statement in parent.body:
        if isinstance(statement, ast.ClassDef):
            name = prefix + statement.name
            found += [(name, _of_class(statement)), *_in_body(statement, f"{name}.")]
        elif isinstance(statement, ast.FunctionDef):
            found += _in_body(statement, f"{prefix}{statement.name}.<locals>.")
    return found


def _of_class(definition: ast.ClassDef) -> dict[str, str | None]:
    """None for a field without a docstring: it does not have the one of a base's field."""
    found: dict[str, str | None] = {}
    for field, after in zip(definition.body, [*definition.body[1:], ast.Pass()], strict=True):
        match field, after:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                found[name] = inspect.cleandoc(text)
            case ast.AnnAssign(target=ast.Name(id=name)), _:
                found[name] = None
    return found
