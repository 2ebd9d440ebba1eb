"""What every section of the configuration is made of. Fields are *fixed* for the life of a run, unless marked `free()`,
which `--resume` may change."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field


def free(default: Any, **constraints: Any) -> Any:
    """A field whose value may change when a run is resumed."""
    return Field(default, json_schema_extra={"free": True}, **constraints)


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, validate_default=True, allow_inf_nan=False)
