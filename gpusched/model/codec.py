"""Values as JSON and back: the one codec of the job table, of GPU readings and of recorded snapshots.

A struct is an object with every field, so that a later default changes nothing that was written; tuples are lists.
Texts may hold lone surrogates for bytes that are not UTF-8 (`os.fsdecode`): command lines, environments, paths. JSON's
fast encoder refuses them, so a document with such a text goes through `json`, which writes them as escapes; both read
both. A high surrogate that is followed by a low one reads back as the character they stand for; `os.fsdecode` never
makes one.
"""

from __future__ import annotations

import json
from functools import cache
from typing import Any, TypeVar

import msgspec

__all__ = ["convert", "decode", "encode", "plain"]

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
