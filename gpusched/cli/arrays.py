"""How ids of arrays, and of many jobs at once, are shown."""

from __future__ import annotations

from gpusched.model.units import id_ranges

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

_WIDEST = 24


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
