"""What the API models share: their base class, with camelCase in JSON, and field types."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Self, TypeVar, cast

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

from meshwright.api.field_docstrings import field_docstrings

if TYPE_CHECKING:
    from pydantic import GetJsonSchemaHandler
    from pydantic.json_schema import JsonSchemaValue
    from pydantic_core import CoreSchema

T = TypeVar("T")

ShortText = Annotated[str, Field(min_length=1, max_length=253)]
"""The name of an object, or a string of that length."""

CLAIM_NAME, IMAGE = r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$", r"^\S+$"
ClaimName = Annotated[str, Field(min_length=1, max_length=253, json_schema_extra={"x-pattern": CLAIM_NAME})]
"""The name of a PersistentVolumeClaim. Only the CRD has the pattern: an object that is stored with another one is
still read, and an API server accepts it as long as the field does not change."""
Image = Annotated[str, Field(min_length=1, max_length=1024, json_schema_extra={"x-pattern": IMAGE})]
"""The name of a container image, in the same way."""

QUANTITY = r"^[0-9]+(\.[0-9]+)?(m|k|M|G|T|P|Ki|Mi|Gi|Ti|Pi)?$"
Quantity = Annotated[str, Field(min_length=1, max_length=32, pattern=QUANTITY)]
"""A Kubernetes resource quantity."""

Time = Annotated[str, Field(max_length=64, json_schema_extra={"format": "date-time"})]
MAX_SAFE_INTEGER = (1 << 53) - 1
"""The largest integer that every JSON reader represents exactly."""
Count = Annotated[int, Field(ge=0, le=MAX_SAFE_INTEGER)]


class ApiModel(BaseModel):
    """A part of the ParallelTrainingJob object or of a message between operator and worker.

    Unknown fields are rejected, and docstrings of fields become their descriptions.
    """

    model_config = ConfigDict(
        alias_generator=to_camel,
        populate_by_name=True,
        extra="forbid",
        validate_default=True,
    )

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """Add the docstrings of fields. Only schemas have them: to read them takes long."""
        schema = handler(core_schema)
        properties = handler.resolve_ref_schema(schema).get("properties", {})
        for name, text in field_docstrings(cls).items():
            alias = cls.model_fields[name].alias if name in cls.model_fields else None
            for key in {name, alias} & set(properties):
                properties[key].setdefault("description", text)
        return schema

    def separate(self) -> Self:
        """A copy that shares nothing that can be changed: `model_copy(deep=True)`, many times faster."""
        return _separate(self)

    def wire(self) -> dict[str, object]:
        """The JSON form, with camelCase keys and without unset fields."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)


def _separate(value: T) -> T:
    """A copy of a model, list or dict and of those inside it."""
    found: Any
    if isinstance(value, BaseModel):
        found = value.model_copy()
        fields = found.__dict__
        for name, part in fields.items():
            if isinstance(part, BaseModel | list | dict):
                fields[name] = _separate(part)
    elif isinstance(value, list):
        found = [_separate(part) for part in value]
    elif isinstance(value, dict):
        found = {key: _separate(part) for key, part in value.items()}
    else:
        return value
    return cast(T, found)
