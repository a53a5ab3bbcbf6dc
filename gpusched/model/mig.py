"""MIG layouts: the profiles of a card, which of them fit on it together, and the layout that was set for it. Pure.

3g.40gb,2x2g.20gb     MIG on, with these instances; the larger ones first
on                    MIG on without instances: no job can use the card
off                   the whole card
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence

from gpusched.model.value import Value

PROFILE = re.compile(r"(?P<slices>\d+)g\.(?P<gib>\d+)gb(?:[+-][a-z.]+)?")
_PART = re.compile(r"(?:(?P<count>\d{1,2})x)?(?P<profile>\S+)")
_MOST_INSTANCES = 8
OFF, ON = "off", "on"


class MigProfile(Value):
    """A kind of MIG instance that a card can have."""

    name: str
    """As printed by `nvidia-smi`: `3g.40gb`."""
    id: int
    """The driver's number of it on this card."""
    slices: int
    """Compute slices; a whole A100 or H100 has 7."""
    memory_mib: int
    size: int = 0
    """Memory slices that it takes; 0 when the driver does not tell."""
    starts: tuple[int, ...] = ()
    """Memory slices at which it may begin."""
    most: int = 1
    """How many of it the card can have at most."""


class MigLayout(Value):
    """How a card is divided. `profiles` are sorted, the largest first."""

    is_on: bool
    profiles: tuple[str, ...] = ()

    def __str__(self) -> str:
        if not self.is_on:
            return OFF
        counts = Counter(self.profiles)
        return ",".join(name if count == 1 else f"{count}x{name}" for name, count in counts.items()) or ON


def layout_of(profiles: Iterable[str]) -> MigLayout:
    """The layout with MIG on and these instances."""
    return MigLayout(True, tuple(sorted(profiles, key=_order)))


def _order(name: str) -> tuple[int, int, str]:
    found = PROFILE.match(name)
    return (0, 0, name) if found is None else (-int(found["slices"]), -int(found["gib"]), name)


class MigState(Value):
    """What a card that can do MIG says about it."""

    profiles: tuple[MigProfile, ...] = ()
    """Empty while unknown, as on a driver that names them only with MIG on."""
    needs_reset: bool = False
    """The driver resets the card to switch MIG on or off, as on Ampere: no program may have it open then."""
    why_not: str | None = None
    """Why the daemon of its node cannot change the layout, as a clause."""
    order: int = 0
    """The last `MigOrder` that was carried out or given up; 0 for none."""
    failure: str | None = None
    """Why that order was given up: a sentence. The layout from before is back, unless it says otherwise."""


class MigOrder(Value):
    """Orders the reader of the GPUs to give an idle card a layout; repeating it changes nothing."""

    number: int
    uuid: str
    layout: MigLayout
    before: MigLayout
    """Made again if the layout cannot be."""


class CardLayout(Value):
    """The layout that was set for a card by command."""

    uuid: str
    node: str
    index: int
    made: MigLayout | None = None
    """The last one that was made; made again when it is found missing at a start."""
    wanted: MigLayout | None = None
    """The one to make as soon as the card is idle; until then it takes no jobs."""
    before: MigLayout = MigLayout(False)
    """The layout of the card when `wanted` was set."""
    number: int = 0
    """Of the order for `wanted`; grows with every change."""
    user: str = ""
    at: float = 0.0
    failure: str | None = None
    """Why the last change was given up, as a sentence."""


class LayoutError(ValueError):
    """A layout that cannot be; the text is a clause, `hint` what to type."""

    def __init__(self, text: str, hint: str) -> None:
        super().__init__(text)
        self.hint = hint


EXAMPLE = "for example: gctl mig set 0 3g.40gb,2x2g.20gb"


def parse_layout(text: str) -> MigLayout:
    """Read a layout as typed. Raises: LayoutError."""
    word = text.strip().lower()
    if word in (OFF, ON):
        return MigLayout(word == ON)
    found: list[str] = []
    for part in word.split(","):
        match = _PART.fullmatch(part.strip())
        if match is None or PROFILE.fullmatch(match["profile"]) is None:
            raise LayoutError(f"{part.strip()!r} is not a MIG profile, such as 3g.40gb or 2x1g.10gb", EXAMPLE)
        found += [match["profile"]] * int(match["count"] or 1)
    if not found or len(found) > _MOST_INSTANCES:
        raise LayoutError(f"{text!r} has {len(found)} instances; a card has 1 to 7", EXAMPLE)
    return layout_of(found)


def check_layout(layout: MigLayout, profiles: Sequence[MigProfile], gpu: str) -> None:
    """Check a layout against a card's profiles, if they are known.

    Args: gpu: the card's name in commands. Raises: LayoutError.
    """
    if not profiles:
        return
    known = {one.name: one for one in profiles}
    for name in layout.profiles:
        if name not in known:
            raise LayoutError(f"the card has no profile {name}", f"it has: {', '.join(known)}")
    for name, count in Counter(layout.profiles).items():
        if count > known[name].most:
            raise LayoutError(
                f"{count} instances of {name} do not fit on the card, which has at most {known[name].most}",
                f"ask for fewer: gctl mig set {gpu} {layout_of([name] * known[name].most)}",
            )
    if placements(layout, profiles) is None:
        most = largest_part(layout.profiles, profiles)
        raise LayoutError(
            f"{layout} does not fit on one card" + (f"; {most} does" if most.profiles else ""),
            "see the sizes with: gctl mig",
        )


def placements(layout: MigLayout, profiles: Sequence[MigProfile]) -> tuple[tuple[MigProfile, int], ...] | None:
    """A profile and its first memory slice for each instance, without overlaps; None if there is no way.

    The driver lets an instance begin at certain slices only, and takes the first free one unless told: in another order
    the same instances may not fit. Profiles without known starts are taken to fit.
    """
    known = {one.name: one for one in profiles}
    if not known.keys() >= set(layout.profiles):
        return None
    wanted = [known[name] for name in layout.profiles]
    counts = Counter(layout.profiles)
    if any(counts[one.name] > one.most for one in wanted):
        return None
    if any(not one.starts for one in wanted):
        return tuple((one, -1) for one in wanted)
    slices = max((one.slices for one in profiles), default=0)
    if sum(one.slices for one in wanted) > slices:
        return None

    def place(rest: Sequence[MigProfile], taken: frozenset[int]) -> tuple[tuple[MigProfile, int], ...] | None:
        if not rest:
            return ()
        first = rest[0]
        for start in first.starts:
            covers = frozenset(range(start, start + first.size))
            if not covers & taken:
                found = place(rest[1:], taken | covers)
                if found is not None:
                    return ((first, start), *found)
        return None

    return place(wanted, frozenset())


def largest_part(names: Iterable[str], profiles: Sequence[MigProfile]) -> MigLayout:
    """The layout of as many of these instances as fit, the first ones first."""
    kept: list[str] = []
    for name in names:
        if placements(layout_of([*kept, name]), profiles) is not None:
            kept.append(name)
    return layout_of(kept)


def layout_with(profile: str, current: MigLayout, profiles: Sequence[MigProfile]) -> MigLayout | None:
    """A layout that has this profile and as much as possible of the current one; None if the card cannot have it."""
    if profile not in {one.name for one in profiles}:
        return None
    return largest_part([profile, *current.profiles], profiles)
