"""Field types that several parts of the API share."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

ShortText = Annotated[str, Field(min_length=1, max_length=253)]
"""The name of an object, or a string of that length."""

Quantity = Annotated[
    str,
    Field(min_length=1, max_length=32, pattern=r"^[0-9]+(\.[0-9]+)?(m|k|M|G|T|P|Ki|Mi|Gi|Ti|Pi)?$"),
]
"""A Kubernetes resource quantity."""
