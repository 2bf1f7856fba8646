"""Converts pydantic models to structural OpenAPI v3 schemas that the Kubernetes API server accepts.

- References are inlined.
- `X | None` becomes X without `nullable`, which would break merge patches.
- Exclusive bounds take their draft-4 form.
- `title` and `additionalProperties: false` are removed.
- A set becomes a list of type `set`.
- Unions of types, and fields without a type, are rejected.

Every field must have a description, and every string, number, list and map must have a bound. Unbounded values make
validation rules too expensive and objects too large.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

Schema = dict[str, Any]

_LIST_KEY = "x-list-map-key"
_ATOMIC = "x-atomic"
_COPIED = (
    "description",
    "enum",
    "format",
    "minLength",
    "maxLength",
    "pattern",
    "minItems",
    "maxItems",
    "maxProperties",
)
_DEEPEST = 32
_INT32 = (-(2**31), 2**31 - 1)


class SchemaError(ValueError):
    """A model that cannot become a structural schema. The message names the field."""


def structural_schema(model: type[BaseModel], *, defaults: bool = True) -> Schema:
    """The schema of `model`. Pass `defaults=False` for what a controller writes, where absent means unknown.

    Raises:
        SchemaError: a field has no description or no bound, or a type that Kubernetes does not support.
    """
    document = model.model_json_schema(by_alias=True, mode="validation")
    return _Converter(document.pop("$defs", {}), defaults).convert(document, model.__name__)


class _Converter:
    def __init__(self, definitions: dict[str, Schema], defaults: bool) -> None:
        self._definitions = definitions
        self._defaults = defaults

    def convert(self, source: Schema, path: str) -> Schema:
        if path.count(".") > _DEEPEST:
            raise SchemaError(f"{path}: recursive models are not supported")
        source = self._resolved(source, path)
        kind = source.get("type")
        handler = {
            "object": self._object,
            "array": self._array,
            "string": self._string,
            "integer": self._number,
            "number": self._number,
            "boolean": self._plain,
        }.get(kind if isinstance(kind, str) else "")
        if handler is None:
            raise SchemaError(f"{path}: type {kind!r} has no structural form")
        result: Schema = {"type": kind} | {key: source[key] for key in _COPIED if key in source}
        if "x-pattern" in source:
            result["pattern"] = source["x-pattern"]
        if "description" in source:
            result["description"] = " ".join(source["description"].split())
        result |= handler(source, path)
        if self._defaults and source.get("default") is not None:
            # An object's default is `{}`: its members bring their own.
            result["default"] = {} if kind == "object" else source["default"]
        return result

    def _resolved(self, source: Schema, path: str) -> Schema:
        """The schema without references and optionality. Keys next to a reference override those of its target."""
        while True:
            if "$ref" in source:
                name = source["$ref"].rsplit("/", 1)[-1]
                source = {**self._definitions[name], **{k: v for k, v in source.items() if k != "$ref"}}
            elif "oneOf" in source:
                raise SchemaError(f"{path}: a union of several types has no structural form")
            elif "anyOf" in source:
                options = [option for option in source["anyOf"] if option.get("type") != "null"]
                if len(options) != 1:
                    raise SchemaError(f"{path}: a union of several types has no structural form")
                source = {**options[0], **{k: v for k, v in source.items() if k != "anyOf"}}
            else:
                return source

    def _object(self, source: Schema, path: str) -> Schema:
        if "properties" not in source:
            values = source.get("additionalProperties")
            if not isinstance(values, dict) or "maxProperties" not in source:
                raise SchemaError(f"{path}: a map needs a value type and maxProperties")
            return {"additionalProperties": self.convert(values, f"{path}.*")}
        properties = {name: self.convert(field, f"{path}.{name}") for name, field in source["properties"].items()}
        for name, field in properties.items():
            if not field.get("description"):
                raise SchemaError(f"{path}.{name}: has no description")
        required = [name for name in source.get("required", ()) if name in properties]
        return {"properties": properties} | ({"required": required} if required else {})

    def _array(self, source: Schema, path: str) -> Schema:
        if "prefixItems" in source:
            raise SchemaError(f"{path}: a tuple has no structural form")
        if "maxItems" not in source:
            raise SchemaError(f"{path}: a list needs maxItems")
        items = self.convert(source["items"], f"{path}[]")
        if source.get("uniqueItems"):
            # The server rejects `uniqueItems`, whose check is quadratic. A set of scalars means the same.
            return {"items": items, "x-kubernetes-list-type": "set"}
        key = source.get(_LIST_KEY)
        if key is None:
            return {"items": items, "x-kubernetes-list-type": "atomic"}
        if key not in items.get("required", ()):
            raise SchemaError(f"{path}: the list's key {key!r} must be required")
        if source.get(_ATOMIC):
            # One writer replaces the list. Its key only tells which entries of two versions are the same.
            return {"items": items, "x-kubernetes-list-type": "atomic"}
        return {"items": items, "x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": [key]}

    def _string(self, source: Schema, path: str) -> Schema:
        if "maxLength" not in source and "enum" not in source and "const" not in source:
            raise SchemaError(f"{path}: a string needs maxLength")
        return {"enum": [source["const"]]} if "const" in source else {}

    def _number(self, source: Schema, path: str) -> Schema:
        if "enum" in source:
            return {"format": "int32"} if source["type"] == "integer" else {}
        bounds: Schema = {}
        for side, exclusive in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
            if exclusive in source:
                bounds |= {side: source[exclusive], exclusive: True}
            elif side in source:
                bounds[side] = source[side]
            else:
                raise SchemaError(f"{path}: a number needs a {side}")
        if source["type"] == "integer":
            fits = bounds["minimum"] >= _INT32[0] and bounds["maximum"] <= _INT32[1]
            return bounds | {"format": "int32" if fits else "int64"}
        return bounds | {"format": "double"}

    def _plain(self, source: Schema, path: str) -> Schema:
        return {}
