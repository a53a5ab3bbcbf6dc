"""What gctl can do, and what `gctl update` can change, as data for the command and for its help."""

from __future__ import annotations

from gpusched.cli.parse import read
from gpusched.model.option import Field, whole, yes_or_no
from gpusched.model.spec import UPDATABLE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

ACTIONS = {
    "hold": "keep jobs from starting, or starting again: gctl hold 41 42, gctl hold -n sweep",
    "release": "undo a hold: gctl release 41, gctl release --all",
    "suspend": "suspend running jobs; they keep their memory: gctl suspend 41",
    "resume": "resume suspended jobs: gctl resume 41",
    "requeue": "stop running jobs and queue them again, with --hold held: gctl requeue 41",
    "update": "change the requests of jobs: gctl update 41 time=2h nice=5 gpus=2",
    "drain": "keep new work off nodes or GPUs: gctl drain 3 -m 'fan is broken'",
    "undrain": "end a drain: gctl undrain 3",
    "reserve": "reserve GPUs for users, once or repeatedly; without a name: list them: gctl reserve",
    "unreserve": "delete a reservation: gctl unreserve course",
    "account": "show accounts with members, shares and usage: gctl account vision",
    "queue": "show queues: guaranteed, held, borrowed and lent GPUs: gctl queue vision",
    "preset": "show the preset in force, and how each would have performed in the last weeks: gctl preset",
    "reload": "reload the config file: gctl reload",
}


UPDATES: dict[str, Field] = {}
"""By their words, the fields that `gctl update` changes."""
for _field in UPDATABLE.values():
    UPDATES.setdefault(_field.word, _field)


def read_change(word: str, text: str) -> dict[str, Any]:
    """The changes of the API for `word=text`; without a text they reset the field. Raises: ValueError."""
    field = UPDATES[word]
    if not text:
        return {field.name: None}
    if field.kind == "boolean":
        return {field.name: yes_or_no(text)}
    option = field.options[0] if field.options else None
    found = read(option, text) if option else {field.name: whole(int(field.low or 0), int(field.high or 0))(text)}
    if word == "gpus":
        # Whole cards take back an earlier fraction, and the other way round; the type stays unless one is given.
        found["gpus"] = 1 if found["gpus"] is None else found["gpus"]
        found = {key: value for key, value in found.items() if key != "gpu_type" or value is not None}
    return {key: value for key, value in found.items() if key in UPDATABLE}
