"""The fields of a Kubernetes object, and which of them were read."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from meshwright_cli.importing.settings import ImportFileError

_PLACEHOLDER = re.compile(r"\$\{?[A-Za-z_]\w*\}?|<[^>]+>|\{\{.*\}\}")


def whole_number(where: str, value: Any) -> int:
    """The value of a field with an integer.

    Raises:
        ImportFileError: it is not an integer. The message says how to fill a placeholder.
    """
    try:
        return int(str(value))
    except ValueError:
        fix = ": replace placeholders first, for example with `envsubst`" if _PLACEHOLDER.search(str(value)) else ""
        raise ImportFileError(f"{where} must be an integer, got {value!r}{fix}") from None


class Fields:
    """An object's fields. What nobody reads has no equivalent in a job."""

    def __init__(self, values: Any, path: str = "") -> None:
        """`path` is where the object is, such as `spec.template`.

        Raises:
            ImportFileError: it is not an object.
        """
        if values is not None and not isinstance(values, Mapping):
            raise ImportFileError(f"`{path}` must be an object, got {values!r}")
        self.path = path
        self._values: Mapping[str, Any] = values or {}
        self._read: set[str] = set()
        self._children: dict[str, Fields] = {}

    def __bool__(self) -> bool:
        """Whether the object has fields."""
        return bool(self._values)

    def __contains__(self, name: str) -> bool:
        """Whether a field is set."""
        return self._values.get(name) is not None

    def get(self, name: str) -> Any:
        """The value of a field, which is now read."""
        self._read.add(name)
        return self._values.get(name)

    @property
    def raw(self) -> Mapping[str, Any]:
        """The object as it is in the file."""
        return self._values

    def same_as(self, other: Fields) -> bool:
        """Whether another object has the same fields."""
        return self._values == other.raw

    def reopen(self, name: str) -> None:
        """A field that was read, but has no equivalent with its value."""
        self._read.discard(name)

    def ignore(self, *names: str) -> None:
        """Fields that Meshwright needs no equivalent of."""
        self._read.update(names)

    def ignore_all(self) -> None:
        """Fields that one comment names together."""
        self._read.update(self._values)
        self._children.clear()

    def integer(self, name: str) -> int | None:
        """The value of a field with an integer.

        Raises:
            ImportFileError: it is not an integer.
        """
        value = self.get(name)
        if value is None:
            return None
        return whole_number(f"`{self._where(name)}`", value)

    def words(self, name: str) -> list[str]:
        """The value of a field with a list of strings.

        Raises:
            ImportFileError: it is not a list.
        """
        value = self.get(name)
        if value is not None and not isinstance(value, list):
            raise ImportFileError(f"`{self._where(name)}` must be a list, got {value!r}")
        return [str(word) for word in value or []]

    def mapping(self, name: str) -> dict[str, Any]:
        """The value of a field with any keys, all of which are now read.

        Raises:
            ImportFileError: it is not an object.
        """
        value = self.get(name)
        if value is not None and not isinstance(value, Mapping):
            raise ImportFileError(f"`{self._where(name)}` must be an object, got {value!r}")
        return dict(value or {})

    def child(self, name: str) -> Fields:
        """The object in a field; an empty one if it is not set.

        Raises:
            ImportFileError: it is not an object.
        """
        if name not in self._children:
            self._read.add(name)
            self._children[name] = Fields(self._values.get(name), self._where(name))
        return self._children[name]

    def children(self, name: str) -> list[Fields]:
        """The objects of a list.

        Raises:
            ImportFileError: it is not a list of objects.
        """
        values = self.get(name)
        if values is not None and not isinstance(values, list):
            raise ImportFileError(f"`{self._where(name)}` must be a list, got {values!r}")
        found = []
        for index, value in enumerate(values or []):
            key = f"{name}[{index}]"
            if key not in self._children:
                self._children[key] = Fields(value, self._where(key))
            found.append(self._children[key])
        return found

    def unread(self) -> Iterator[str]:
        """The paths of the fields that were not read."""
        for name, value in self._values.items():
            if name not in self._read and value not in (None, {}, [], ""):
                yield self._where(name)
        for child in self._children.values():
            yield from child.unread()

    def _where(self, name: str) -> str:
        return f"{self.path}.{name}" if self.path else name
