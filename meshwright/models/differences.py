"""In which fields two models differ, in the names of `spec.model`."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic.alias_generators import to_camel


def differing_fields(
    there: Mapping[str, object], here: Mapping[str, object], where: str = "here", prefix: str = ""
) -> list[str]:
    """Each field with both values, such as "`normEpsilon` 1e-06 there, 1e-05 here"; of parts, such as a mixture, only
    the fields in them that differ.

    Args:
        there: Fields of the architecture that was read, in the order in which they are listed.
        here: The same fields of the job's.
        where: What stands for the job's model.
        prefix: Name of the part, with a period.
    """
    found = []
    for name, value in there.items():
        other, field = here[name], prefix + ".".join(map(to_camel, name.split(".")))
        if isinstance(value, Mapping) and isinstance(other, Mapping) and value.keys() == other.keys():
            found += differing_fields(value, other, where, f"{field}.")
        elif value != other:
            found.append(f"`{field}` {value} there, {other} {where}")
    return found
