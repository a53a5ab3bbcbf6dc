"""Templates: texts with the names of facts in braces, and how facts look in them."""

from __future__ import annotations

import time
from collections.abc import Mapping
from string import Formatter

from gpusched.model.alerts import FACTS
from gpusched.model.spelling import closest

TITLES: Mapping[str, str] = {
    "begin": "job {job} ({name}) has started",
    "end": "job {job} ({name}): {state}",
    "fail": "job {job} ({name}): {state}",
    "retry": "job {job} ({name}) is tried again",
    "preempt": "job {job} ({name}) had to make room",
    "time_limit_80": "job {job} ({name}) comes near its time limit",
    "held": "job {job} ({name}) is held",
    "pending": "job {job} ({name}) still waits",
    "gpu_idle": "job {job} ({name}) leaves its GPUs idle",
    "vram_over": "job {job} ({name}) uses more GPU memory than it booked",
    "gpu_unbooked": "job {job} ({name}) uses a GPU that it did not book",
    "gpu_intruder": "job {job} ({name}) is not alone on its GPU",
    "queue_empty": "no job of {user} is left",
    "test": "a test",
    "gpu_foreign": "a process on GPU {gpus} of {node} that is no job",
}
ADMIN_TITLE = "{event} on {node}"
TITLE_PREFIX = "gpusched: "

BODY = (
    "{message}\n\nnode {node}, GPUs {gpus}, started {start_at}, ran {elapsed} of {time_limit}\n"
    "directory {work_dir}\noutput {output}\n"
)
PLAIN_BODY = "{message}\n"
_PLAIN = ("queue_empty", "pending", "test", "gpu_foreign")


def default_texts(event: str) -> tuple[str, str]:
    """Title and body of an event for which the user wrote none."""
    title = TITLE_PREFIX + TITLES.get(event, ADMIN_TITLE)
    return title, BODY if event in TITLES and event not in _PLAIN else PLAIN_BODY


def problem_of(template: str) -> str | None:
    """What is wrong with a template, as a sentence; None when nothing is."""
    try:
        parts = list(Formatter().parse(template))
    except ValueError:
        return "has a brace without its partner; write {{ or }} for a brace of your own"
    for _, name, form, conversion in parts:
        if name is None:
            continue
        if name not in FACTS:
            near = closest(name, FACTS)
            hint = f"did you mean {{{near}}}?" if near else "known are: " + ", ".join(FACTS)
            return f"uses {{{name[:40]}}}, which is no fact; {hint}"
        if form or conversion:
            return f"asks for a form of {{{name}}}; a name alone is what may stand in braces"
    return None


def fill(template: str, facts: Mapping[str, str | float]) -> str:
    """The template with the facts in place of their names; `-` for what there is not."""
    return template.format_map({name: _shown(name, facts.get(name)) for name in FACTS})


def _shown(name: str, value: str | float | None) -> str:
    if value is None:
        return "-"
    if isinstance(value, str):
        # Names and paths may hold bytes that are no text, which no message can carry.
        return value.encode("utf-8", "backslashreplace").decode()
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(value))
