"""The options of gsub that make many tasks of one submission, and how their ids are shown."""

from __future__ import annotations

from gpusched.cli.parse import Option, text, whole
from gpusched.model.units import id_ranges

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from gpusched.cli.parse import Values

_WIDEST = 24


def sweep(value: str) -> Values:
    """`lr=1e-3,1e-4`; several uses make every combination."""
    return {"sweep": [value]}


def array_options() -> list[Option]:
    """The options."""
    many = "Many tasks"
    return [
        Option(
            "-a",
            "--array",
            metavar="TASKS",
            read=text("array"),
            section=many,
            help="one task for each number: 0-9, 1,3,5 or 0-30:2; 0-99%4 runs at most 4 at once; the number is in "
            "GPUSCHED_ARRAY_TASK_ID and SLURM_ARRAY_TASK_ID",
        ),
        Option(
            "--sweep",
            metavar="NAME=VALUES",
            read=sweep,
            section=many,
            help="one task for each value, lr=1e-3,1e-4 or seed=0..4, in the variable of that name and in place of "
            "{lr} in the command; may be repeated: every combination is a task",
        ),
        Option(
            "--max-fails",
            metavar="N",
            read=whole("max_fails", 0, 4_000_000),
            section=many,
            help="when more than N tasks have failed, cancel the rest; default: go on",
        ),
    ]


def shown_id(job_id: str, tasks_left: str | None, throttle: int | None) -> str:
    """The id of an array with its tasks that have not begun, `42_[7-99%4]`; of anything else the id itself."""
    if not tasks_left:
        return job_id
    limit = f"%{throttle}" if throttle is not None else ""
    return f"{job_id}_[{_short(tasks_left, _WIDEST)}{limit}]"


def folded_ids(ids: Sequence[str]) -> str:
    """Several jobs in one word, `412-9999 (9,588 jobs)`; one alone is its id."""
    if len(ids) == 1:
        return ids[0]
    return folded_ranges(id_ranges(tuple(map(int, one.split("_"))) for one in ids), len(ids))


def folded_ranges(ranges: str, count: int) -> str:
    """The same of ranges of ids, as the daemon folds them."""
    return f"{_short(ranges, _WIDEST // 2)} ({count:,} jobs)"


def _short(ids: str, width: int) -> str:
    """As many of these ids and ranges as fit, the first one in any case."""
    if len(ids) <= width or "," not in ids:
        return ids
    return (ids[:width].rpartition(",")[0] or ids.partition(",")[0]) + ",..."
