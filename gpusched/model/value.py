"""The base of all values that the parts of gpusched hand to each other: frozen, comparable, hashable.

    class Xid(Value):
        number: int
        at: float

Values are msgspec structs: making one costs a tenth of a frozen dataclass, and so does a copy with other fields. They
are never part of a reference cycle, so the garbage collector passes over them. Neither the commands at the prompt nor
supervisors import this module: what they need of the model is free of it.
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
    """A frozen value. Equal are values of one class with equal fields."""


T = TypeVar("T")

plain = msgspec.to_builtins
"""A value in built-in types; tuples stay tuples."""

_write = msgspec.json.Encoder().encode


def encode(value: object) -> bytes:
    """A value as one compact JSON document, which is always valid UTF-8."""
    try:
        return _write(value)
    except UnicodeEncodeError:
        return json.dumps(plain(value), separators=(",", ":")).encode()


def decode(document: str | bytes, kind: type[T]) -> T:
    """The value of this type that the document was made of. A field that is missing has its default.

    Raises: ValueError with the place, for a part of another type, a field that is not known, or one without default
    that is missing.
    """
    wanted: Any = kind
    try:
        value: T = _decoder(wanted).decode(document)
    except msgspec.ValidationError as error:
        raise _misfit(error) from None
    except msgspec.DecodeError:
        # A lone surrogate, or no JSON: then this says so.
        return convert(json.loads(document), kind)
    return value


@cache
def _decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(kind)


def convert(parts: object, kind: type[T], place: str = "") -> T:
    """The value of this type that was made into these built-in types; texts that are keys may stand for numbers.

    Args: place: where the parts are in a larger document.
    Raises: as `decode`.
    """
    try:
        return msgspec.convert(parts, kind, str_keys=True)
    except msgspec.ValidationError as error:
        raise _misfit(error, place) from None


def _misfit(error: msgspec.ValidationError, place: str = "") -> ValueError:
    """The error with the place as Python writes it: "nodes[0].cpus: expected `float`, got `str`"."""
    text, _, path = str(error).partition(" - at ")
    where = path.replace("`", "").replace("$" if place else "$.", place).removeprefix("$") or place
    return ValueError(f"{where + ': ' if where else ''}{text[:1].lower()}{text[1:]}")


def declared(kind: type, *, cache_hash: bool = False, **defaults: Value) -> Any:
    """The value that a class of `gpusched.model.spec` declares, as a class of `gpusched.model.job`.

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
