"""Docstrings of fields become descriptions, from the class's source."""

from __future__ import annotations

from typing import Any

from meshwright.api.base import ApiModel
from meshwright.api.field_docstrings import field_docstrings


class Base(ApiModel):
    kept: int = 1
    """Kept by
    subclasses."""
    replaced: int = 1
    """Of the base."""
    cleared: int = 1
    """Not of a field that is declared again without one."""
    plain: int = 1

    def method(self) -> None:
        """Of no field."""


class Derived(Base):
    replaced: int = 2
    """Of the subclass."""
    cleared: int = 2
    last_field: int = 2
    """In the schema under its alias."""

    class Inner(ApiModel):
        field: int = 1
        """Of a class in a class."""


def test_each_field_has_its_own_docstring_or_that_of_a_base() -> None:
    kept = {"kept": "Kept by\nsubclasses."}
    assert field_docstrings(Base) == kept | {
        "replaced": "Of the base.",
        "cleared": "Not of a field that is declared again without one.",
    }
    assert field_docstrings(Derived) == kept | {
        "replaced": "Of the subclass.",
        "last_field": "In the schema under its alias.",
    }
    assert field_docstrings(Derived.Inner) == {"field": "Of a class in a class."}


def test_schemas_have_them() -> None:
    for by_alias, name in ((True, "lastField"), (False, "last_field")):
        properties = Derived.model_json_schema(by_alias=by_alias)["properties"]
        assert properties[name]["description"] == "In the schema under its alias."
        assert "description" not in properties["cleared"]


def test_a_class_without_source_has_none() -> None:
    names: dict[str, Any] = {"__name__": "no_module", "ApiModel": ApiModel}
    exec("class Made(ApiModel):\n    field: int\n    '''Lost.'''", names)
    assert field_docstrings(names["Made"]) == {}
