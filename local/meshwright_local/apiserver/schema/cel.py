"""CEL rules of custom resources (`x-kubernetes-validations`): compiles and evaluates them.

The engine implements the CEL core. Its Python library has the string, list, set and math extensions, and this module
three that only Kubernetes has (`find`, `findAll`, `isSorted`). A rule that uses any other function is rejected when the
CustomResourceDefinition is written, not when an object is validated.
"""

from __future__ import annotations

import base64
import datetime
import re
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import cel
from cel.stdlib import STDLIB_FUNCTIONS

from meshwright.api.objects import KubeObject
from meshwright_local.apiserver.schema.structural import SchemaNode
from meshwright_local.apiserver.status_errors import Cause

_WORDS = re.compile(r"\w+")
_NATIVE = _WORDS.findall(
    """all bytes contains double duration dyn endsWith exists exists_one filter getDate getDayOfMonth getDayOfWeek
    getDayOfYear getFullYear getHours getMilliseconds getMinutes getMonth getSeconds has hasValue int map matches none
    of optFlatMap optMap or orValue size startsWith string timestamp type uint value"""
)
_RESERVED = _WORDS.findall(
    """as break const continue else false for function if import in let loop namespace null package return true var
    void while"""
)
_ESCAPES = (("__", "__underscores__"), (".", "__dot__"), ("-", "__dash__"), ("/", "__slash__"))
_EXTENSIONS: dict[str, Any] = {
    **STDLIB_FUNCTIONS,
    "find": lambda text, pattern: found[0] if (found := re.search(pattern, text)) else "",
    "findAll": lambda text, pattern, limit=None: [m[0] for m in re.finditer(pattern, text)][:limit],
    "isSorted": lambda values: all(a <= b for a, b in zip(values, values[1:], strict=False)),
}
_KNOWN = {*_NATIVE} | {name.rsplit(".", 1)[-1] for name in _EXTENSIONS}
_DURATION = re.compile(r"([0-9.]+)(ns|us|µs|ms|s|m|h)")
_SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_PREFIXES = {
    "FieldValueInvalid": 'Invalid value: "{type}": ',
    "FieldValueForbidden": "Forbidden: ",
    "FieldValueRequired": "Required value: ",
    "FieldValueDuplicate": 'Duplicate value: "{type}": ',
}
_EXPECTED: dict[str | None, Any] = {"object": dict, "array": list, "string": str, "integer": int, "boolean": bool}
_GO = {"integer": "int", "boolean": "bool", "array": "list"}
REASONS = tuple(_PREFIXES)
"""The reasons that a rule may have."""


class CelError(ValueError):
    """An expression cannot be compiled."""


@dataclass(frozen=True, slots=True)
class Expression:
    """A compiled expression; `transition`: it uses the old object (`oldSelf`)."""

    program: cel.Program
    extended: bool
    transition: bool

    def evaluate(self, variables: KubeObject | cel.Context) -> Any:
        """Return the value of the expression; raises any error of the CEL engine."""
        if self.extended and not isinstance(variables, cel.Context):
            variables = converted(variables)
        return self.program.execute(variables)


def converted(variables: KubeObject) -> cel.Context:
    """Convert variables once for several expressions: that takes 30 times as long as to evaluate a rule of a job."""
    return cel.Context(variables=variables, functions=_EXTENSIONS)


@lru_cache(maxsize=4096)
def compile_expression(source: str) -> Expression:
    """Compile an expression.

    Raises:
        CelError: it cannot be parsed, or uses an unknown function.
    """
    try:
        program = cel.compile(source)
    except (ValueError, RuntimeError) as error:
        raise CelError(f"compilation failed: {error}") from None
    functions = {name for name in program.functions() if name[0] not in "_!@-"}
    if unknown := sorted(functions - _KNOWN):
        raise CelError(f"compilation failed: the embedded server does not know the function {unknown[0]!r}")
    return Expression(program, not functions.issubset(_NATIVE), "oldSelf" in program.variables())


def check_rules(node: SchemaNode, value: Any, old: Any, path: str) -> list[Cause]:
    """Return the errors of a field's rules. `old` is None if there was no value before.

    If the value did not change, violated rules are ignored unless they compare old and new, but rules that cannot be
    evaluated are errors, as on the real server.
    """
    rules = node.raw.get("x-kubernetes-validations") or ()
    if not rules:
        return []
    field = _Field(node, value, old, path, unchanged=old is not None and value == old, several=len(rules) > 1)
    found = (_check(rule, field) for rule in rules)
    return [cause for cause in found if cause is not None]


def check_rule(rule: KubeObject, node: SchemaNode, value: Any, old: Any, path: str) -> Cause | None:
    """Return the error of one rule, or None. `old` is None if there was no value before."""
    return _check(rule, _Field(node, value, old, path, unchanged=False, several=False))


class _Field:
    """A value and its schema, as its rules see them."""

    def __init__(self, node: SchemaNode, value: Any, old: Any, path: str, *, unchanged: bool, several: bool) -> None:
        """`several` is whether more than one rule will be evaluated."""
        self.node, self.value, self.path, self.unchanged = node, value, path, unchanged
        self.now = visible(node, value)
        self.was = None if old is None else visible(node, old)
        self._several = several

    @cached_property
    def variables(self) -> KubeObject | cel.Context:
        """Those of a rule that does not compare old and new; raises an error of the CEL engine."""
        return converted({"self": self.now}) if self._several else {"self": self.now}

    def transition(self, *, optional: bool) -> KubeObject:
        """The variables of a rule that compares old and new."""
        if not optional:
            return {"self": self.now, "oldSelf": self.was}
        old = cel.OptionalValue.none() if self.was is None else cel.OptionalValue.of(self.was)
        return {"self": self.now, "oldSelf": old}


def _check(rule: KubeObject, field: _Field) -> Cause | None:
    node, path = field.node, field.path
    expression = compile_expression(rule["rule"])
    optional = bool(rule.get("optionalOldSelf"))
    if expression.transition and field.was is None and not optional:
        return None
    kind = node.type or "object"
    try:
        variables = field.transition(optional=optional) if expression.transition else field.variables
        if expression.evaluate(variables) is True or (field.unchanged and not expression.transition):
            return None
        text = _message(rule, variables)
    except Exception as error:  # noqa: BLE001 - the engine raises many types; all mean that the rule failed
        what = f"no such key: {error.args[0]}" if isinstance(error, KeyError) else str(error)
        text = f"{_mistyped(node, field.value) or what} evaluating rule: {rule.get('message') or rule['rule']}"
        return Cause(path.lstrip(".") or "<nil>", REASONS[0], _PREFIXES[REASONS[0]].format(type=kind) + text)
    reason = rule.get("reason") or REASONS[0]
    prefix = _PREFIXES.get(reason, _PREFIXES[REASONS[0]]).format(type=kind)
    return Cause((path + rule.get("fieldPath", "")).lstrip("."), reason, prefix + text)


def _mistyped(node: SchemaNode, value: Any) -> str:
    """Return the real server's message for the first value of a type other than the schema's; empty if none."""
    wanted = _EXPECTED.get(node.type)
    unexpected = wanted is not None and (
        not isinstance(value, wanted) or isinstance(value, bool) is not (wanted is bool)
    )
    if unexpected and value is not None:
        if node.type == "object":
            return "invalid data, expected a map for the provided schema with type=object"
        return f"invalid data, expected {_GO.get(str(node.type), node.type)}, got {_go_type(value)}"
    if isinstance(value, dict):
        children = ((node.child(key), item) for key, item in value.items())
        return next((text for sub, item in children if sub is not None and (text := _mistyped(sub, item))), "")
    if isinstance(value, list) and node.items is not None:
        return next((text for item in value if (text := _mistyped(node.items, item))), "")
    return ""


def _go_type(value: Any) -> str:
    names = {bool: "bool", int: "int64", float: "float64", str: "string", list: "[]interface {}"}
    return names.get(type(value), "map[string]interface {}")


def _message(rule: KubeObject, variables: KubeObject | cel.Context) -> str:
    plain = str(rule.get("message") or f"failed rule: {rule['rule']}").strip()
    if not rule.get("messageExpression"):
        return plain
    try:
        text = compile_expression(rule["messageExpression"]).evaluate(variables)
    except Exception:  # noqa: BLE001 - if the message expression fails, the plain message is used, as documented
        return plain
    return text.strip() if isinstance(text, str) and text.strip() and "\n" not in text.strip() else plain


def visible(node: SchemaNode, value: Any) -> Any:
    """Convert a value for CEL: types by the schema, escaped field names, of metadata only the name."""
    if isinstance(value, dict):
        out = {}
        for key, item in value.items():
            sub = node.child(key)
            if key == "metadata" and "apiVersion" in node.properties:
                item = {k: v for k, v in item.items() if k in ("name", "generateName")}
            if sub is not None:
                out[escape(key) if key in node.properties else key] = visible(sub, item)
        return out
    if isinstance(value, list):
        return [visible(node.items, item) for item in value] if node.items else value
    if node.type == "number" and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if node.type == "integer" and isinstance(value, float) and value.is_integer():
        return int(value)
    return _formatted(node.raw.get("format"), value) if isinstance(value, str) and node.type == "string" else value


def _formatted(form: str | None, text: str) -> Any:
    try:
        if form in ("date-time", "datetime", "date"):
            moment = datetime.datetime.fromisoformat(text)
            return moment if moment.tzinfo else moment.replace(tzinfo=datetime.UTC)
        if form == "duration":
            return datetime.timedelta(seconds=sum(float(n) * _SECONDS[u] for n, u in _DURATION.findall(text)))
        return base64.b64decode(text) if form == "byte" else text
    except ValueError:
        return text


def escape(name: str) -> str:
    """Escape a property name for CEL, such as `__namespace__` or `a__dash__b`."""
    if name in _RESERVED:
        return f"__{name}__"
    for raw, written in _ESCAPES:
        name = name.replace(raw, written)
    return name
