"""Typed access to the fields of a Hugging Face `config.json`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class ConfigError(ValueError):
    """A configuration that cannot be read or written exactly. The message names the field and what is wrong."""


class ConfigFields:
    """The fields of a configuration. Each method raises a ConfigError for a value of another type."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = config

    def number(self, name: str, default: int | None = None) -> int:
        """Return an integer. null counts as left out."""
        value = self._config.get(name)
        if value is None:
            if default is None:
                raise ConfigError(f"`{name}` is missing")
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ConfigError(f"`{name}` must be an integer, got {value!r}")
        return value

    def flag(self, name: str, default: bool) -> bool:
        """Return a boolean."""
        value = self._config.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise ConfigError(f"`{name}` must be true or false, got {value!r}")
        return value

    def real(self, name: str, default: float) -> float:
        """Return a number."""
        value = self._config.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(f"`{name}` must be a number, got {value!r}")
        try:
            return float(value)
        except OverflowError:
            raise ConfigError(f"`{name}` is too large, it has {len(str(value))} digits") from None

    def text(self, name: str) -> str:
        """Return a string. Empty if it is left out."""
        return str(self._config.get(name) or "")

    def choice(self, name: str, *known: str) -> str:
        """Return one of the `known` strings. The first if it is left out."""
        value = self.text(name) or known[0]
        if value not in known:
            raise ConfigError(f"`{name}` {value!r} is not supported: use one of {', '.join(known)}")
        return value

    def listed(self, name: str) -> list[Any]:
        """Return a list. Empty if it is left out."""
        value = self._config.get(name)
        if value is not None and not isinstance(value, list):
            raise ConfigError(f"`{name}` must be a list, got {value!r}")
        return value or []

    def section(self, *names: str) -> ConfigFields | None:
        """Return the fields of the first of these objects that exists, else None."""
        found = next((self._config[name] for name in names if self._config.get(name)), None)
        return ConfigFields(found) if isinstance(found, Mapping) else None
