"""What the planner does so that it can also be compiled, see decision 49.

`copy.copy` makes an object without its `__init__`, which a compiled class does not allow: its objects are made as any
other, and take over the fields.
"""

from __future__ import annotations

from typing import TypeVar

T = TypeVar("T")

_UNSET = object()


def is_compiled() -> bool:
    """Whether this is the compiled form."""
    return not __file__.endswith(".py")


def take_over(made: T, source: T) -> T:
    """Give an object all fields of another of its class, whose values both then share; returns it."""
    kind: object = type(source)
    names = getattr(kind, "__slots__", None) or getattr(kind, "__mypyc_attrs__", None) or source.__dict__
    for name in names:
        value = getattr(source, name, _UNSET)
        if value is not _UNSET:
            setattr(made, name, value)
    return made
