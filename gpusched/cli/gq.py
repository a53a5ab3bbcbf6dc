"""gq: the queue, and why something waits."""

from __future__ import annotations

import sys
import time

from gpusched.cli import output
from gpusched.cli.options import gq_table
from gpusched.cli.parse import parse
from gpusched.cli.query import COMPACT, query, quote
from gpusched.client import connect
from gpusched.errors import UsageError
from gpusched.model.units import format_duration, format_size_mib, gpu_label, printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from gpusched.cli.parse import Values
    from gpusched.client import Client

_NAME_WIDTH = 24
_STILL = ("suspended_at", "suspended_s")
_FIELDS = (
    "id",
    "name",
    "user",
    "state",
    "start_at",
    "end_at",
    "gpu_request",
    "node",
    "gpus",
    "reason",
    "reason_text",
    *_STILL,
    "idle_at",
    "tasks_left",
    "throttle",
)
_ORDER = {"RUNNING": 0, "COMPLETING": 1, "SUSPENDED": 1, "PENDING": 2}


def main() -> int:
    """Entry point."""
    return output.run("gq", body)


def body(words: list[str]) -> int:
    """Show; returns the exit code."""
    table = gq_table()
    values, operands, _ = parse(table, words, operands_first=True)
    if output.common(table, values):
        return 0
    if operands:
        values["ids"] = [*values.get("ids", []), *operands]
    with connect() as client:
        if "why" in values:
            return _why(client, values)
        if values.get("watch"):
            return _watch(client, values)
        show(client, values)
    return 0


def show(client: Client, values: Values) -> None:
    """Print the jobs once, in the form that was asked for."""
    asked = query(values)
    if values.get("tree"):
        for key in ("format", "sort", "start", "priority"):
            if key in values:
                raise UsageError(f"--tree has an order and columns of its own, so --{key} has no effect", "give one")
        from gpusched.cli.tree import show_tree  # few prompts ask for it

        show_tree(client, asked, values)
    elif values.get("start"):
        from gpusched.cli.ahead import show_starts  # few prompts ask for it

        show_starts(client, asked, values)
    elif values.get("priority"):
        from gpusched.cli.standing import show_priorities  # likewise

        show_priorities(client, asked, values)
    elif values.get("json"):
        answer = client.call("GET", f"/v1/jobs?{asked}")
        if "sort" in values:
            _sort_objects(answer["jobs"], values["sort"])
        output.print_json(answer)
    elif values.get("quiet"):
        rows = client.call("GET", f"/v1/jobs?fields=id&{asked}")["rows"]
        sys.stdout.write("".join(f"{row[0]}\n" for row in rows))
    elif "format" in values:
        from gpusched.cli.slurm_format import keys, render  # the % language; few prompts speak it

        fields = ["id", *keys(values["format"]), *[key.lstrip("+-") for key in values.get("sort", ())]]
        rows = client.call("GET", f"/v1/jobs?fields={quote(','.join(fields))}&{asked}")["rows"]
        jobs = [dict(zip(fields, row)) for row in rows]  # noqa: B905  3.10 can, but the keyword costs
        _sort_objects(jobs, values.get("sort", []))
        sys.stdout.write(render(values["format"], jobs, header=not values.get("noheader")))
    else:
        _table(client, asked, values)


def _sort_objects(jobs: list[dict[str, Any]], keys: list[str]) -> None:
    for key in reversed(keys):
        name = key.lstrip("+-")
        if jobs and name not in jobs[0]:
            raise UsageError(f"unknown field {printable(name, 40)!r}", f"fields: {', '.join(jobs[0])}")
        jobs.sort(key=lambda job: _sortable(job.get(name)), reverse=key.startswith("-"))


def _sortable(value: object) -> tuple[int, float, str]:
    if isinstance(value, (int, float)):
        return 0, float(value), ""
    text = "" if value is None else str(value)
    if text.isascii() and text.isdigit():
        return 0, float(text), ""
    return (2 if value is None else 1), 0.0, text


def _table(client: Client, asked: str, values: Values) -> None:
    sort = [key.lstrip("+-") for key in values.get("sort", ())]
    fields = [*_FIELDS, *[key for key in sort if key not in _FIELDS]]
    is_terminal = sys.stdout.isatty()
    told = "&notices=1" if is_terminal else ""
    answer = client.call("GET", f"/v1/jobs?progress=1{told}&fields={','.join(fields)}&{asked}")
    rows = answer["rows"]
    if sort:
        for key in reversed(values["sort"]):
            at = fields.index(key.lstrip("+-"))
            rows.sort(key=lambda row: _sortable(row[at]), reverse=key.startswith("-"))
    else:
        rows.sort(key=lambda row: _ORDER.get(row[3], 3))
    output.note_missing("gq", answer)
    now = time.time()
    lines = [_line(row, now) for row in rows]
    titles = ["ID", "NAME", "USER", "ST", "TIME", "GPUS", "NODE/REASON"]
    progress = answer.get("progress")
    if progress:
        from gpusched.cli.bars import bar  # few queues have one

        bars = {job_id: bar(fraction, eta_at, now) for job_id, (fraction, eta_at) in progress.items()}
        lines = [(*line[:-1], bars.get(line[0], ""), line[-1]) for line in lines]
        titles.insert(-1, "PROGRESS")
    output.print_table(titles, lines, right=frozenset({0, 4}), header=not values.get("noheader"))
    if answer.get("notices"):
        from gpusched.cli import notices  # most days there are none

        sys.stdout.write(f"{notices.line(answer['notices'], now)}\n")


def _line(row: list[Any], now: float) -> tuple[str, ...]:
    job_id, name, user, state, start_at, end_at, wanted, node, gpus, reason, reason_text = row[:11]
    suspended_at, suspended_s, idle_at, tasks_left, throttle = row[11:16]
    elapsed = "0:00"
    if start_at is not None and state != "PENDING":
        elapsed = format_duration(max(0.0, (end_at or suspended_at or now) - start_at - suspended_s))
    if state in ("RUNNING", "COMPLETING"):
        where = f"{node}:{','.join(gpu_label(gpu['index']) for gpu in gpus)}" if gpus else (node or "")
        if idle_at is not None:
            where += f" idle {format_duration(max(0.0, now - idle_at))}"
    elif state == "SUSPENDED":
        where = f"({reason_text})"
    elif reason and reason != "None":
        where = f"({reason}) {reason_text or ''}"
    else:
        where = node or ""
    if tasks_left:
        from gpusched.cli.arrays import shown_id  # most queues have none

        job_id = shown_id(job_id, tasks_left, throttle)
    return (
        job_id,
        printable(name, _NAME_WIDTH),
        printable(user, 16),
        COMPACT.get(state, state),
        elapsed,
        wanted,
        printable(where.rstrip()),
    )


def _why(client: Client, values: Values) -> int:
    why = client.call("GET", f"/v1/jobs/{quote(values['why'])}/why")["why"]
    if values.get("json"):
        output.print_json({"why": why})
        return 0
    reason = f" ({why['reason']})" if why["reason"] not in (None, "None") else ""
    text = f": {printable(why['text'])}" if why["text"] != f"is {why['state']}" else ""
    sys.stdout.write(f"job {why['id']} is {why['state']}{reason}{text}\n")
    for key, value in why["facts"].items():
        if value in (None, {}, []):
            continue
        if key == "unavailable":
            sys.stdout.write("".join(f"  {key}: {printable(str(one['why']))}\n" for one in value))
            continue
        sys.stdout.write(f"  {printable(str(key))}: {printable(_fact(key, value))}\n")
    if why["priority"]:
        parts = ", ".join(f"{key} {value:.1f}" for key, value in why["priority"].items() if key != "total")
        sys.stdout.write(f"  priority: {why['priority']['total']:.1f} ({parts})\n")
    from gpusched.cli.ahead import why_lines

    sys.stdout.write("".join(f"  {printable(line)}\n" for line in why_lines(why, time.time())))
    return 0


def _fact(key: str, value: object) -> str:
    if key.endswith("_at") and isinstance(value, (int, float)):
        return time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(value))
    if key.endswith("_mib") and isinstance(value, (int, float)):
        return format_size_mib(value)
    if isinstance(value, list):
        return ", ".join(str(item) for item in value)
    if isinstance(value, dict):
        return ", ".join(f"{name} {_fact(str(name), item)}" for name, item in value.items())
    return str(value)


def _watch(client: Client, values: Values) -> int:
    is_terminal = sys.stdout.isatty()
    try:
        while True:
            if is_terminal:
                sys.stdout.write("\x1b[H\x1b[2J")
            sys.stdout.write(time.strftime("%H:%M:%S\n"))
            show(client, values)
            sys.stdout.flush()
            time.sleep(1)
    except KeyboardInterrupt:
        return 0
