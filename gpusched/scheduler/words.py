"""How the policy speaks: requests, counts, names and lengths of time in a few words."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from gpusched.model.job import Request
from gpusched.model.units import format_amount, format_size_mib, plural, plural_of

NAMED = 3
"""Jobs, cards or nodes that a sentence names before it says how many more there are."""
MOST_CHOICES = 8
"""Names that a hint offers."""


def describe(request: Request, *, full: bool = False) -> str:
    """What a request asks for, in a few words; GPUs alone unless `full`, else everything."""
    part = describe_part(request, full=full)
    if request.nodes > 1:
        alone = "nodes of its own" if request.is_exclusive else "nodes"
        text = f"{request.nodes} {alone} with {part} each"
    else:
        text = f"a node of its own with {part}" if request.is_exclusive else part
    if full and request.licenses:
        text = name_some("", [text, *(licenses(name, count) for name, count in request.licenses)], named=99)
    return text


def describe_part(request: Request, *, full: bool = False) -> str:
    """As `describe`, of one of the nodes."""
    words = []
    linked = "linked " if request.is_linked and request.gpus > 1 else ""
    if request.gpu_fraction is not None:
        words.append(f"{format_amount(request.gpu_fraction)} of {_a(request.gpu_type)}")
    elif request.vram_mib is not None:
        where = f" on each of {request.gpus} {linked}GPUs" if request.gpus > 1 else ""
        words.append(f"{format_size_mib(request.vram_mib)} of VRAM{where}")
    elif request.gpus:
        words.append(plural(request.gpus, linked + (f"{request.gpu_type} GPU" if request.gpu_type else "GPU")))
    if full or not words:
        if request.cpus:
            words.append(plural(request.cpus, "CPU"))
        if request.mem_mib:
            words.append(f"{format_size_mib(request.mem_mib)} of memory")
        words.extend(f"{count} of {name}" for name, count in request.resources)
    return name_some("", words, named=len(words)) or "next to nothing"


def describe_where(request: Request) -> str:
    """The nodes that a request is limited to, to follow what it asks for; empty when it is not."""
    texts = []
    if request.nodelist:
        texts.append(f"on {name_some('node', list(request.nodelist))}")
    if request.constraint is not None:
        texts.append(f"with {request.constraint}" if texts else f"on nodes with {request.constraint}")
    if request.exclude:
        texts.append(f"not on {name_some('node', list(request.exclude))}")
    return ", ".join(texts)


def licenses(name: str, count: int) -> str:
    """`1 license matlab`, `2 licenses matlab`."""
    return f"{plural(count, 'license')} {name}"


def _a(gpu_type: str | None) -> str:
    return "a GPU" if gpu_type is None else f"one {gpu_type} GPU"


def name_some(noun: str, names: Sequence[str], named: int = NAMED) -> str:
    """`job 7`, `jobs 7 and 8`, `jobs 7, 8, 9 and 4 more`; empty for no names."""
    if not names:
        return ""
    shown = list(names[:named])
    if len(names) > named:
        shown.append(f"{len(names) - named} more")
    text = shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}"
    return f"{plural_of(len(names), noun)} {text}" if noun else text


def choose(names: Iterable[str], option: str) -> str:
    """`name it: -q nlp`, `name one of them: -q nlp, -q vision`, and `account=nlp` for the option `account=`."""
    ordered = sorted(names)
    shown = ", ".join(with_value(option, name) for name in ordered[:MOST_CHOICES])
    more = f" and {len(ordered) - MOST_CHOICES} more" if len(ordered) > MOST_CHOICES else ""
    return f"name {'it' if len(ordered) == 1 else 'one of them'}: {shown}{more}"


def with_value(option: str, value: str) -> str:
    """An option as it is typed: `-q nlp`, `queue=nlp`."""
    return f"{option}{value}" if option.endswith("=") else f"{option} {value}"


def about(seconds: float) -> str:
    """A length of time as people say it: `about 12 min`, `about 3 h`, `less than a minute`."""
    if seconds < 60:
        return "less than a minute"
    if seconds < 5400:
        return f"about {seconds / 60:.0f} min"
    if seconds < 2 * 86400:
        return f"about {seconds / 3600:.0f} h"
    return f"about {seconds / 86400:.0f} days"
