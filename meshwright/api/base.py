"""The base of all API models: camelCase in JSON, unknown fields rejected, docstrings as descriptions."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict
from pydantic.alias_generators import to_camel


class ApiModel(BaseModel):
    """A part of the ParallelTrainingJob object or of a message between operator and worker."""

    model_config = ConfigDict(
        alias_generator=to_camel,
        populate_by_name=True,
        extra="forbid",
        use_attribute_docstrings=True,
        validate_default=True,
    )

    def wire(self) -> dict[str, object]:
        """The JSON form, with camelCase keys and without unset fields."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)
