"""The base of all values that the parts of gpusched hand to each other: frozen, comparable, hashable.

    class Xid(Value):
        number: int
        at: float

Values are msgspec structs: making one costs a tenth of a frozen dataclass, and so does a copy with other fields. They
are never part of a reference cycle, so the garbage collector passes over them. Neither the commands at the prompt nor
supervisors import this module: what they need of the model is free of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.structs import asdict, fields

__all__ = ["Value", "asdict", "fields", "replace"]

if TYPE_CHECKING:
    # Typed: the one of dataclasses is checked field by field.
    from dataclasses import replace

    from typing_extensions import dataclass_transform
else:
    from msgspec.structs import replace

    def dataclass_transform(**_: Any) -> Any:
        """PEP 681, for type checkers only."""
        return lambda kind: kind


@dataclass_transform(frozen_default=True, field_specifiers=(msgspec.field,))
class Value(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    """A frozen value. Equal are values of one class with equal fields."""
