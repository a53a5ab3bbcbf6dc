"""New settings for a daemon that runs: read anew, checked, put in place of the old ones between two ticks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from gpusched.access import check_admin
from gpusched.config import SETTINGS, Loaded
from gpusched.config.schema import value_of, with_value
from gpusched.errors import Refused, UsageError
from gpusched.model.cluster import NodeView
from gpusched.model.commands import Reload
from gpusched.model.settings import Settings
from gpusched.model.value import fields
from gpusched.scheduler import cells
from gpusched.scheduler.draft import Layout
from gpusched.scheduler.sharing.membership import membership_findings
from gpusched.scheduler.sharing.quota_problems import problems
from gpusched.scheduler.sharing.usage import capacity_of


@dataclass(frozen=True, slots=True)
class Reloaded:
    """Settings to go on with."""

    settings: Settings
    changed: tuple[str, ...]
    """Paths whose value is another one now."""
    fixed: tuple[str, ...]
    """Paths that have another value in the file, which counts after a restart only."""
    notes: tuple[str, ...] = ()
    """What is allowed, and hardly what was meant."""

    def answer(self) -> dict[str, Any]:
        """For the client."""
        notes = {"notes": list(self.notes)} if self.notes else {}
        return {"changed": list(self.changed), "needs_restart": list(self.fixed), **notes}


def reread(
    command: Reload,
    running: Settings,
    read: Callable[[], Loaded] | None,
    nodes_under: Callable[[Settings], tuple[NodeView, ...]],
) -> Reloaded:
    """The settings that are to run from now on. Raises: Forbidden, Refused, UsageError; the running ones stay.

    Args: nodes_under: the machines as they would be with these settings; none while nobody knows their GPUs.
    """
    check_admin(command.caller, "reload the settings", running)
    if read is None:
        raise Refused("this scheduler was not started from a config file", "restart it with other settings")
    loaded = read()
    wanted = loaded.settings
    check_promises(wanted)
    _check_machines(loaded, nodes_under(wanted))
    differing = _differing(running, wanted)
    fixed = tuple(path for path in differing if path in SETTINGS and SETTINGS[path].needs_restart)
    settings = wanted
    for path in fixed:
        settings = with_value(settings, path, value_of(running, path))
    notes = tuple(f"{text}; {hint}" for _, text, hint in membership_findings(settings))
    return Reloaded(settings, tuple(path for path in differing if path not in fixed), fixed, notes)


def check_promises(settings: Settings) -> None:
    """Refuse settings whose queues are promised what contradicts each other, or is no promise. Raises: UsageError."""
    for path, text in (*problems(settings, None), *cells.problems(settings)):
        raise UsageError(f"{path}: {text}", "mend the config file; see what it says with: gpusched config show")


def _check_machines(loaded: Loaded, nodes: tuple[NodeView, ...]) -> None:
    """Refuse promises that these machines cannot keep. Raises: Refused with file and line."""
    settings = loaded.settings
    if not settings.queue or not nodes:
        return
    layout = Layout(nodes, settings)
    for path, text in (*problems(settings, capacity_of(layout)), *cells.problems(settings, layout)):
        raise Refused(f"{loaded.place_of(path)}: {text}", "promise less, or see what there is with: ginfo")


def _differing(one: Settings, other: Settings) -> list[str]:
    """Paths of settings with two values: `daemon.poll_s`, `queue.vision`, `plugins.load`."""
    paths: list[str] = []
    for section in fields(Settings):
        if section.name == "stated":
            # What is stated and says what the preset says changes nothing.
            continue
        before, after = getattr(one, section.name), getattr(other, section.name)
        if isinstance(before, tuple):
            paths += [f"{section.name}.load"] if before != after else []
            continue
        old, new = _named(before), _named(after)
        names = [name for name in (*old, *(new.keys() - old.keys())) if old.get(name) != new.get(name)]
        paths += [f"{section.name}.{name}" for name in names]
    return sorted(paths)


def _named(section: Any) -> Mapping[str, Any]:
    """What a section holds, by name: its settings, or one value for each queue, QOS, account, licence."""
    if isinstance(section, Mapping):
        return section
    return {part.name: getattr(section, part.name) for part in fields(section)}
