"""What add-ons bring, found where the core asks for it: the core imports no add-on, and works without any.

An add-on is a folder of `gpusched/addons`. Its `ENTRY_POINTS` say what it brings to which point, as in the metadata
of a package: `{"command.web": "gpusched.addons.web.command:app"}`. They are read from the folders, not by
`importlib.metadata`, which takes longer to import than gsub takes, and which a clone does not have.
"""

from __future__ import annotations

import os

from gpusched.errors import NotReady

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_FOLDER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "addons")
_declared: dict[str, str] = {}
"""Point -> `module` or `module:object`; empty until the first question."""


def _brought_by(addon: str) -> dict[str, str]:
    if not os.path.exists(os.path.join(_FOLDER, addon, "__init__.py")):
        return {}
    found: dict[str, str] = _import(f"gpusched.addons.{addon}").ENTRY_POINTS
    return found


def _points() -> dict[str, str]:
    if not _declared and os.path.isdir(_FOLDER):
        for addon in sorted(os.listdir(_FOLDER)):
            _declared.update(_brought_by(addon))
    return _declared


def _import(module: str) -> Any:
    # importlib would be imported for this alone. The name is one that every module has.
    return __import__(module, fromlist=("__name__",))


def where(point: str) -> str | None:
    """`module` or `module:object` that an add-on brings to a point; None if none does."""
    return _points().get(point)


def find(point: str) -> Any | None:
    """What an add-on brings to a point, imported; None if none does."""
    found = where(point)
    return None if found is None else _load(found)


def all_of(kind: str) -> dict[str, Any]:
    """What add-ons bring to the points of one kind, by what follows it: `settings.web` as `web`."""
    points = ((point.partition("."), found) for point, found in _points().items())
    return {name: _load(found) for (before, _, name), found in points if before == kind}


def need(point: str, addon: str, what: str) -> Any:
    """What this add-on brings to a point; others are not looked at.

    Args: what: needs it, for the sentence. Raises: NotReady where it is absent.
    """
    found = _brought_by(addon).get(point)
    if found is None:
        raise absent(addon, what)
    return _load(found)


def absent(addon: str, what: str) -> NotReady:
    """The error of what needs an add-on that is not there."""
    return NotReady(
        f"{what} needs the add-on {addon}, which this copy of gpusched does not have",
        "install gpusched with all of its add-ons: pip install --force-reinstall gpusched-lab",
    )


def _load(found: str) -> Any:
    module, _, name = found.partition(":")
    brought = _import(module)
    return getattr(brought, name) if name else brought
