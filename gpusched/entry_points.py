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


def _points() -> dict[str, str]:
    if not _declared and os.path.isdir(_FOLDER):
        from importlib import import_module

        for name in sorted(os.listdir(_FOLDER)):
            if os.path.exists(os.path.join(_FOLDER, name, "__init__.py")):
                _declared.update(import_module(f"gpusched.addons.{name}").ENTRY_POINTS)
    return _declared


def names(kind: str) -> list[str]:
    """Names of the points of a kind that add-ons serve: `web` of `command.web`."""
    return [point[len(kind) + 1 :] for point in _points() if point.startswith(f"{kind}.")]


def find(point: str) -> Any | None:
    """What an add-on brings to a point; None if none does."""
    where = _points().get(point)
    if where is None:
        return None
    from importlib import import_module

    module, _, name = where.partition(":")
    found = import_module(module)
    return getattr(found, name) if name else found


def need(point: str, addon: str, what: str) -> Any:
    """What an add-on brings to a point.

    Args: addon: which is expected to; what: needs it, for the sentence. Raises: NotReady where it is absent.
    """
    found = find(point)
    if found is None:
        raise absent(addon, what)
    return found


def absent(addon: str, what: str) -> NotReady:
    """The error of what needs an add-on that is not there."""
    return NotReady(
        f"{what} needs the add-on {addon}, which this copy of gpusched does not have",
        "install gpusched with all of its add-ons: pip install --force-reinstall gpusched-lab",
    )
