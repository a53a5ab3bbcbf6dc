"""How texts and the small values of the model become documents, and how they come back.

Texts may hold lone surrogates for bytes that are not UTF-8 (`os.fsdecode`), which SQLite's TEXT cannot
hold: such a text is stored as a JSON string. A high surrogate that is followed by a low one reads back
as the character they stand for; `os.fsdecode` never makes one.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from json import JSONEncoder, loads
from operator import attrgetter
from typing import Any

from gpusched.model.job import (
    AdoptedProcess,
    Alerting,
    ArraySpec,
    ClientProcess,
    GpuShare,
    Interactive,
    JobSpec,
    Launch,
    Notice,
    Request,
    RetryRule,
)
from gpusched.model.snapshot import Placement
from gpusched.model.value import fields

_needs_quoting = re.compile('\\A"|[\0\ud800-\udfff]').search


def pack_text(text: str) -> str:
    """A text as TEXT can hold it: itself nearly always, else a JSON string."""
    return pack(text) if _needs_quoting(text) else text


def unpack_text(stored: str) -> str:
    """The text that was packed."""
    return str(loads(stored)) if stored.startswith('"') else stored


def pack_or_none(text: str | None) -> str | None:
    return None if text is None else pack_text(text)


def unpack_or_none(stored: str | None) -> str | None:
    return None if stored is None else unpack_text(stored)


_DOCUMENTS = (
    *(Request, RetryRule, Launch, Notice, GpuShare, Placement, ArraySpec, Alerting, Interactive, ClientProcess),
    AdoptedProcess,
)
_PARTS = {kind: tuple(kind.__struct_fields__) for kind in _DOCUMENTS}
_GETTERS = {kind: attrgetter(*names) for kind, names in _PARTS.items()}


def _plain(value: object) -> dict[str, Any]:
    """One of the small values as a document with every field, so that a later default changes no old job."""
    kind: Any = type(value)
    return dict(zip(_PARTS[kind], _GETTERS[kind](value), strict=True))


pack = JSONEncoder(ensure_ascii=True, allow_nan=False, separators=(",", ":"), default=_plain).encode
"""A value as a JSON document; the small values of the model with every field."""

# Thousands of jobs share these, equal or even the same object, so each is written out once.
pack_request = lru_cache(maxsize=1024)(pack)
pack_retry = lru_cache(maxsize=256)(pack)
pack_launch = lru_cache(maxsize=64)(pack)
pack_gpus = lru_cache(maxsize=256)(pack)


def unpack_request(stored: str) -> Request:
    """Raises: TypeError, ValueError when it is no request."""
    parts = loads(stored)
    for name in _REQUEST_LISTS & parts.keys():
        parts[name] = tuple(parts[name])
    for name in _REQUEST_COUNTS & parts.keys():
        parts[name] = counts(parts[name])
    return Request(**parts)


_REQUEST_LISTS = {"nodelist", "exclude"}
_REQUEST_COUNTS = {"licenses", "resources"}


def counts(pairs: Sequence[Sequence[Any]]) -> tuple[tuple[str, int], ...]:
    return tuple((name, count) for name, count in pairs)


EXTRAS = (
    "array",
    "fallback",
    "alerting",
    "interactive",
    "snapshot",
    "step",
    "ignore_idle",
    "never_satisfied",
    "fallback_of",
    "adopted",
)
"""Parts of a spec that few jobs have."""
_extras_of = attrgetter(*EXTRAS)
_DEFAULTS = {item.name: item.default for item in fields(JobSpec)}
_NO_EXTRAS = tuple(_DEFAULTS[name] for name in EXTRAS)


def pack_extras(spec: JobSpec) -> str:
    """What is not the default among the parts that few jobs have."""
    values = _extras_of(spec)
    if values == _NO_EXTRAS:
        return "{}"
    given = zip(EXTRAS, values, _NO_EXTRAS, strict=True)
    return pack({name: value for name, value, default in given if value != default})


def unpack_extras(stored: str) -> dict[str, Any]:
    """Parts of a spec by name. Raises: KeyError, TypeError, ValueError when they make no sense."""
    if stored == "{}":
        return {}
    parts: dict[str, Any] = loads(stored)
    unknown = parts.keys() - set(EXTRAS)
    if unknown:
        raise KeyError(min(unknown))
    if (array := parts.get("array")) is not None:
        array["sweep"] = tuple((name, tuple(values)) for name, values in array["sweep"])
        parts["array"] = ArraySpec(**array)
    if (alerting := parts.get("alerting")) is not None:
        parts["alerting"] = Alerting(**{name: tuple(words) for name, words in alerting.items()})
    if (interactive := parts.get("interactive")) is not None:
        if (client := interactive.get("client")) is not None:
            interactive["client"] = ClientProcess(**client)
        parts["interactive"] = Interactive(**interactive)
    if (adopted := parts.get("adopted")) is not None:
        parts["adopted"] = AdoptedProcess(**adopted)
    return parts


def unpack_retry(stored: str) -> RetryRule:
    """Raises: KeyError, TypeError, ValueError when it is no retry rule."""
    parts = loads(stored)
    parts["retry_on"] = tuple(parts["retry_on"])
    return RetryRule(**parts)


def unpack_launch(stored: str) -> Launch:
    """Raises: KeyError, TypeError, ValueError when it is no launch."""
    parts = loads(stored)
    parts["argv"] = tuple(parts["argv"])
    if parts["notice"] is not None:
        parts["notice"] = Notice(**parts["notice"])
    return Launch(**parts)


@lru_cache(maxsize=256)
def unpack_gpus(stored: str) -> tuple[GpuShare, ...]:
    """Raises: TypeError, ValueError when it is no list of bookings."""
    return tuple(GpuShare(**share) for share in loads(stored))
