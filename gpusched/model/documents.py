"""Frozen values as what JSON can carry, and exactly the same values back, by the types of their fields.

    dataclass    an object with every field          float   a number; without end, the word "Infinity"
    mapping      an object                           tuple   a list

Nothing in a document names a class or is looked up: which value is made of what is told by the types here alone.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Callable, Mapping
from functools import cache
from math import inf, isfinite
from typing import Any

from gpusched.model.units import printable
from gpusched.model.value import Value, fields

Read = Callable[[Any], Any]

_ENDLESS = {"Infinity": inf, "-Infinity": -inf}
_LARGEST = 1 << 63
"""No count, size or id is beyond; a whole number of a million digits would take hours to add."""


class Mismatch(ValueError):
    """A part of a document that is not what stands there by its type."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text
        self.where: list[str] = []
        """From the inside out: `.name`, `[3]`."""

    def __str__(self) -> str:
        return f"{''.join(reversed(self.where)).removeprefix('.') or 'it'} {self.text}"


def plain(value: Any) -> Any:
    """A frozen value in built-in types. Raises: TypeError for what a document cannot carry."""
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, float):
        if isfinite(value):
            return value
        return next(word for word, endless in _ENDLESS.items() if endless == value)
    if isinstance(value, Value):
        return {name: plain(getattr(value, name)) for name in value.__struct_fields__}
    if isinstance(value, tuple):
        return [plain(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    raise TypeError(f"{type(value).__name__} is nothing that a document can carry")


def read(kind: Any, document: Any) -> Any:
    """The value of this type that `plain` made the document of. A field that is missing has its default.

    Raises: Mismatch with the place, for a part of another type, a field that is not known, or one without default
    that is missing.
    """
    return reader(kind)(document)


@cache
def reader(kind: Any) -> Read:
    """What reads values of a type: a dataclass, or one that is made of plain ones."""
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Annotated:
        return reader(parts[0])
    if origin in (types.UnionType, typing.Union):
        (inner,) = [part for part in parts if part is not types.NoneType]
        known = reader(inner)
        return lambda document: None if document is None else known(document)
    if origin is tuple:
        return _many(reader(parts[0])) if parts[-1] is Ellipsis else _each([reader(part) for part in parts])
    if origin is not None and issubclass(origin, Mapping):
        return _mapping(reader(parts[1]))
    if origin is Callable:
        return _function
    return _record(kind) if isinstance(kind, type) and issubclass(kind, Value) else _PLAIN[kind]


def _within(known: Read, document: Any, where: str) -> Any:
    try:
        return known(document)
    except Mismatch as error:
        error.where.append(where)
        raise


def _many(known: Read) -> Read:
    def read_many(document: Any) -> Any:
        if type(document) is not list:
            raise _is_no(document, "list")
        try:
            return tuple([known(item) for item in document])
        except Mismatch:
            # Again, to tell which: the usual way is free of that.
            return tuple(_within(known, item, f"[{number}]") for number, item in enumerate(document))

    return read_many


def _each(known: list[Read]) -> Read:
    def read_each(document: Any) -> Any:
        if type(document) is not list or len(document) != len(known):
            raise _is_no(document, f"list of {len(known)}")
        pairs = enumerate(zip(known, document, strict=True))
        return tuple(_within(one, item, f"[{number}]") for number, (one, item) in pairs)

    return read_each


def _mapping(known: Read) -> Read:
    def read_mapping(document: Any) -> Any:
        if type(document) is not dict:
            raise _is_no(document, "object")
        return {key: _within(known, item, f".{printable(key, 40)}") for key, item in document.items()}

    return read_mapping


def _record(kind: Any) -> Read:
    known: dict[str, Read] = {}
    required: list[str] = []

    def learn() -> None:
        # Not before a value is there: a type may have parts of its own kind.
        required.extend(one.name for one in fields(kind) if one.required)
        known.update({one.name: reader(one.type) for one in fields(kind)})

    def read_record(document: Any) -> Any:
        if type(document) is not dict:
            raise _is_no(document, "object")
        if not known:
            learn()
        made = {}
        for name, item in document.items():
            one = known.get(name)
            if one is None:
                raise Mismatch(f"has {printable(repr(name), 40)}, which this release does not know")
            try:
                made[name] = one(item)
            except Mismatch as error:
                error.where.append(f".{name}")
                raise
        for name in required:
            if name not in made:
                raise Mismatch(f"lacks {name}")
        return kind(**made)

    return read_record


def _is_no(document: Any, what: str) -> Mismatch:
    return Mismatch(f"is {printable(repr(document), 40)}, which is no {what}")


def _function(document: Any) -> Any:
    raise Mismatch("would be a function, which no document carries")


def _text(document: Any) -> Any:
    if type(document) is not str:
        raise _is_no(document, "text")
    return document


def _truth(document: Any) -> Any:
    if type(document) is not bool:
        raise _is_no(document, "true or false")
    return document


def _whole(document: Any) -> Any:
    if type(document) is not int or not -_LARGEST <= document <= _LARGEST:
        raise _is_no(document, "whole number")
    return document


def _number(document: Any) -> Any:
    if type(document) is float and isfinite(document):
        return document
    if type(document) is int and -_LARGEST <= document <= _LARGEST:
        # As it was: a text made of it later must not differ.
        return document
    if type(document) is str and document in _ENDLESS:
        return _ENDLESS[document]
    raise _is_no(document, "number")


_PLAIN: dict[Any, Read] = {str: _text, bool: _truth, int: _whole, float: _number}
