"""Variants as they are typed: `a100:2|rtx3090:4`, and the options of a further request, `-g rtx3090:4 -c 16 -t 8h`.

Command-line clients import this module: as `model.option`, it must not import msgspec, regular expressions or typing.
"""

from __future__ import annotations

from gpusched.model.option import (
    GPU_VARIANTS,
    AmbiguousOption,
    CommandLine,
    MissingValue,
    Option,
    OptionError,
    Several,
)
from gpusched.model.request import GPU_KEYS, Request, TaskLayout
from gpusched.model.units import closest, printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from gpusched.model.option import Field

BOTH = "the request has variants both with | and with --or"
BOTH_HINT = "name all of them in one way, for example: --or '-g rtx3090:4'"


def variant_fields() -> dict[str, Field]:
    """The fields that a variant may state, by JSON name."""
    from gpusched.model.option import fields_of
    from gpusched.model.spec import FIELDS  # it needs this module for its readers

    names = {*fields_of(Request), *fields_of(TaskLayout), "time_limit_s"}
    return {name: field for name, field in FIELDS.items() if name in names}


def read_variant(text: str) -> dict[str, Any]:
    """The fields that the options of a further request state. Raises: ValueError with a sentence."""
    import shlex  # few jobs have variants

    try:
        words = shlex.split(text)
    except ValueError:
        raise ValueError(f"{printable(text, 60)!r} has a quote that is not closed") from None
    if not words:
        raise ValueError("the request is empty; write the options that differ, as in '-g rtx3090:4 -c 16'")
    options = {name: one for field in variant_fields().values() for one in field.options for name in one.names}
    line = CommandLine([options], words, has_equals=True)
    found: dict[str, Any] = {}
    try:
        for option, name, given in line:
            for key, part in _stated_by(option, name, given).items():
                before = found.get(key)
                found[key] = {**before, **part} if isinstance(before, dict) and isinstance(part, dict) else part
            if found.pop(GPU_VARIANTS, None):
                raise ValueError(f"{option.long} names variants with |, and so does --or; use one of the two")
    except MissingValue as error:
        raise ValueError(f"{error.name} needs a value") from None
    except AmbiguousOption as error:
        raise ValueError(f"{error.name} is short for {', '.join(sorted(error.candidates))}") from None
    except OptionError as error:
        raise ValueError(_unknown(error.word, options)) from None
    if line.operands:
        raise ValueError(
            f"{printable(line.operands[0], 40)!r} is not an option; a variant states options of resources and time, "
            "as in '-g rtx3090:4 -t 8h'"
        )
    return stated(found)


def _stated_by(option: Option, name: str, text: str | None) -> dict[str, Any]:
    """The fields that one option sets. Raises: ValueError."""
    if not option.metavar:
        if text is not None:
            raise ValueError(f"{name} takes no value")
        return dict(option.sets or {})
    assert option.read is not None
    try:
        value = option.read(text or "")
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    return value if isinstance(value, Several) else {option.key: value}


def _unknown(word: str, options: Mapping[str, Option]) -> str:
    shown = printable(word, 40)
    near = closest(word.partition("=")[0], [name for name in options if name.startswith("--")])
    meant = f"; did you mean {near}?" if near else "; give it outside of --or, where it holds for all variants"
    return f"{shown} is not an option of a variant; those are the options for resources, tasks, nodes and time{meant}"


def stated(values: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that these values of options state, as JSON."""
    return {
        key: list(value) if isinstance(value, tuple) else value for key, value in values.items() if value is not None
    }


def over_first(first: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a variant with those of the first request, which hold where the variant does not state its own."""
    from gpusched.model.layout import replaced_by  # clients do not merge

    replaced = set(replaced_by(own))
    if not GPU_KEYS.isdisjoint(own):
        replaced |= GPU_KEYS
    names = variant_fields()
    return {**{key: value for key, value in first.items() if key in names and key not in replaced}, **own}
