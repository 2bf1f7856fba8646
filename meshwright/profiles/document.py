"""The administrator's profiles by name, and which of them a namespace may use."""

from __future__ import annotations

import difflib

from pydantic import TypeAdapter, ValidationError

from meshwright.administrator import load_mapping, problems_of
from meshwright.profiles.profile import Name, Profile

NOT_ALLOWED = "ProfileNotAllowed"
"""Reason of a job whose profile does not exist, or is not for its namespace."""

_DOCUMENT = TypeAdapter(dict[Name, Profile])


class ProfilesError(ValueError):
    """The document of profiles is invalid. The message names the fields and what they must be."""


class Profiles:
    """All profiles."""

    def __init__(self, by_name: dict[str, Profile] | None = None) -> None:
        self._by_name = by_name or {}

    def __len__(self) -> int:
        """The number of profiles."""
        return len(self._by_name)

    def find(self, name: str, namespace: str) -> Profile | str:
        """The profile, or why jobs of the namespace may not use it."""
        profile = self._by_name.get(name)
        if profile is not None and profile.allows(namespace):
            return profile
        allowed = sorted(known for known, other in self._by_name.items() if other.allows(namespace))
        close = difflib.get_close_matches(name, allowed, 1)
        if close:
            others = f"Did you mean `{close[0]}`?"
        elif allowed:
            others = f"Use one of {', '.join(f'`{known}`' for known in allowed)}, or remove the field"
        else:
            others = "Remove the field"
        if profile is None:
            return f"`spec.workers.profile` is `{name}`, but the administrator has defined no such profile. {others}"
        return (
            f"`spec.workers.profile` is `{name}`, which the administrator does not allow in namespace {namespace}. "
            f"{others}, or ask the administrator to add the namespace to `profiles.{name}.namespaces`"
        )


def parse_profiles(text: str) -> Profiles:
    """Parse the document, a mapping from names to profiles, in YAML or JSON. An empty one has no profiles.

    Raises:
        ProfilesError: The document is invalid.
    """
    try:
        return Profiles(_DOCUMENT.validate_python(load_mapping(text, "a mapping from names to profiles")))
    except ValidationError as error:
        raise ProfilesError(problems_of(error)) from None
    except ValueError as error:
        raise ProfilesError(str(error)) from None
