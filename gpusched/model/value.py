"""The base of all values passed between the parts of gpusched: frozen, comparable, hashable.

    class Xid(Value):
        number: int
        at: float

Values are msgspec structs: construction costs a tenth of a frozen dataclass, as does a copy with other fields. They
are never part of a reference cycle and are exempt from garbage collection. Neither command-line clients nor
supervisors import this module: their parts of the model do not depend on it.
"""

from __future__ import annotations

import json
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from msgspec.structs import asdict, fields

from gpusched.model.option import REQUIRED, Field, field

if TYPE_CHECKING:
    from dataclasses import replace

    from typing_extensions import dataclass_transform
else:
    from msgspec.structs import replace

    def dataclass_transform(**_: Any) -> Any:
        """PEP 681, for type checkers only."""
        return lambda kind: kind


__all__ = ["Value", "asdict", "convert", "declared", "decode", "encode", "fields", "plain", "replace"]


@dataclass_transform(frozen_default=True, field_specifiers=(msgspec.field, field))
class Value(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    """A frozen value. Values are equal if they have the same class and equal fields."""


T = TypeVar("T")

plain = msgspec.to_builtins
"""Convert a value to built-in types; tuples stay tuples."""

_write = msgspec.json.Encoder().encode


def encode(value: object) -> bytes:
    """Encode a value as one compact JSON document, always valid UTF-8."""
    try:
        return _write(value)
    except UnicodeEncodeError:
        return json.dumps(plain(value), separators=(",", ":")).encode()


def decode(document: str | bytes, kind: type[T]) -> T:
    """Decode a value of this type. Missing fields take their defaults.

    Raises: ValueError with the location, for a part of the wrong type, an unknown field, or a missing field without
    a default.
    """
    wanted: Any = kind
    try:
        value: T = _decoder(wanted).decode(document)
    except msgspec.ValidationError as error:
        raise _misfit(error) from None
    except msgspec.DecodeError:
        # A lone surrogate, or invalid JSON, which raises here.
        return convert(json.loads(document), kind)
    return value


@cache
def _decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(kind)


def convert(parts: object, kind: type[T], place: str = "") -> T:
    """Convert built-in types to a value of this type; keys may be numbers as strings.

    Args: place: location of the parts in a larger document.
    Raises: as `decode`.
    """
    try:
        return msgspec.convert(parts, kind, str_keys=True)
    except msgspec.ValidationError as error:
        raise _misfit(error, place) from None


def _misfit(error: msgspec.ValidationError, place: str = "") -> ValueError:
    """The error with its location in Python syntax: "nodes[0].cpus: expected `float`, got `str`"."""
    text, _, path = str(error).partition(" - at ")
    where = path.replace("`", "").replace("$" if place else "$.", place).removeprefix("$") or place
    return ValueError(f"{where + ': ' if where else ''}{text[:1].lower()}{text[1:]}")


def declared(kind: type, *, cache_hash: bool = False, **defaults: Value) -> Any:
    """Make a value class from a declaration in `gpusched.model.spec`, for `gpusched.model.job`.

    Args: defaults: of attributes that are values themselves.
    """
    hints = {name: hint for name, hint in kind.__annotations__.items() if not hint.startswith("ClassVar")}
    parts: dict[str, Any] = {"__module__": "gpusched.model.job", "__annotations__": hints, **defaults}
    for name, part in vars(kind).items():
        if isinstance(part, Field):
            if name in hints and part.default is not REQUIRED:
                parts[name] = part.default
        elif name not in ("__dict__", "__weakref__"):
            parts.setdefault(name, part)
    make: Any = type(Value)
    return make(kind.__name__, (Value,), parts, cache_hash=cache_hash)
