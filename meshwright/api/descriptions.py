"""Descriptions in JSON schemas: the docstring below each field.

pydantic can read these docstrings when a class is created (`use_attribute_docstrings`), but parses the class's source
for it: in every process that imports the API, a fifth of the CPU time of the import. Only what writes a schema needs
descriptions, so only that reads them.
"""

from __future__ import annotations

import ast
import inspect
import sys
from functools import cache
from itertools import pairwise
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue

from meshwright.api.base import ApiModel


class DescribedJsonSchema(GenerateJsonSchema):
    """Describes each field of an `ApiModel` by its docstring, unless the field itself has a description."""

    def model_schema(self, schema: Any) -> JsonSchemaValue:
        """The schema of a model, with descriptions of its fields."""
        found = super().model_schema(schema)
        model = schema["cls"]
        if not issubclass(model, ApiModel):
            return found
        properties = found.get("properties", {})
        for name, info in model.model_fields.items():
            key = (self.by_alias and info.alias) or name
            if key in properties and info.description is None and (text := _docstring(model, name)) is not None:
                properties[key] = self.handle_ref_overrides({**properties[key], "description": text})
        return found


def _docstring(model: type[BaseModel], field: str) -> str | None:
    """The docstring below a field, in the class that declares it."""
    for base in model.__mro__:
        if field in base.__dict__.get("__annotations__", {}):
            return _docstrings(base.__module__).get(f"{base.__qualname__}.{field}")
    return None


@cache
def _docstrings(module: str) -> dict[str, str]:
    """Class and field -> docstring, for all classes of a module. Empty if its source is not there."""
    found: dict[str, str] = {}
    try:
        source = inspect.getsource(sys.modules[module])
    except (OSError, TypeError, KeyError):
        return found
    _collect(ast.parse(source), "", found)
    return found


def _collect(scope: ast.AST, prefix: str, found: dict[str, str]) -> None:
    """Collect the docstrings of the classes in a module, a class or a function."""
    for node in ast.iter_child_nodes(scope):
        if isinstance(node, ast.ClassDef):
            for declaration, text in pairwise(node.body):
                match declaration, text:
                    case ast.AnnAssign(target=ast.Name(id=field)), ast.Expr(value=ast.Constant(value=str(docstring))):
                        found[f"{prefix}{node.name}.{field}"] = inspect.cleandoc(docstring)
            _collect(node, f"{prefix}{node.name}.", found)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            _collect(node, f"{prefix}{node.name}.<locals>.", found)
