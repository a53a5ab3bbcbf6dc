"""Who chooses the preset: an add-on under `preset = "auto"`, otherwise the settings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from gpusched import entry_points
from gpusched.daemon.tick import Ticker
from gpusched.model.planner_settings import AUTO
from gpusched.model.presets import FAIR

POINT, ADD_ON = "preset.auto", "simulate"
"""Where the add-on that compares presets is found."""


class PresetChoice(Protocol):
    """What the daemon asks of it; see the class of the same purpose below, and `AutoPreset` of the add-on."""

    def document(self) -> dict[str, Any]:
        """For clients: the preset in force, and why."""

    def table(self) -> dict[str, Any]:
        """For clients: the results of the last evaluation for each preset."""

    def judge_now(self) -> None:
        """Evaluate the presets now. Raises: Refused while an evaluation is under way."""

    def poll(self) -> bool:
        """Do a small part of what is due; return whether to call again soon."""

    def close(self) -> None:
        """Abort the current evaluation."""


class StatedPreset:
    """The preset of the settings, where no add-on compares presets."""

    def __init__(self, ticker: Ticker) -> None:
        self._scheduler = ticker.scheduler

    def document(self) -> dict[str, Any]:
        setting = self._scheduler.settings.priority.preset
        return {
            "setting": setting,
            "in_force": FAIR if setting == AUTO else setting,
            "since_at": None,
            "why": "the settings say so",
            "problem": None,
            "judged_at": None,
            "next_at": None,
            "is_judging": False,
        }

    def table(self) -> dict[str, Any]:
        return {**self.document(), "jobs": None, "jobs_since_at": None, "compared_with": None, "presets": []}

    def judge_now(self) -> None:
        raise entry_points.absent(ADD_ON, "comparing presets")

    def poll(self) -> bool:
        return False

    def close(self) -> None:
        pass


def preset_choice(
    ticker: Ticker, path: str | None = None, on_choice: Callable[[str], None] = lambda name: None
) -> PresetChoice:
    """Args: path: file of the last decision; None to keep it in memory. on_choice: gets a newly chosen preset, before
    the settings change.
    """
    found = entry_points.find(POINT)
    chosen: PresetChoice = StatedPreset(ticker) if found is None else found.AutoPreset(ticker, path, on_choice)
    return chosen


def chosen_preset(path: str) -> str:
    """The preset that was chosen last, which `auto` stands for. Args: path: file of the last decision."""
    found = entry_points.find(POINT)
    return FAIR if found is None else str(found.read_state(path).in_force)


def sentence(document: dict[str, Any]) -> str:
    """The preset in force and why, without instants: `auto: fair; no other preset would be better`."""
    in_force, setting = document["in_force"], document["setting"]
    if setting != AUTO:
        return str(in_force)
    return f"{AUTO}: {in_force}; {document['why']}"
