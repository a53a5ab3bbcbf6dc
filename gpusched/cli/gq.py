"""gq: the queue, and why jobs are pending."""

from __future__ import annotations

import sys
import time

from gpusched.cli import output, tables
from gpusched.cli.options import gq_table
from gpusched.cli.parse import parse
from gpusched.cli.query import (
    check_names,
    elapsed,
    elapsed_s,
    folded_ranges,
    query,
    quote,
    shorter_id,
    shown_id,
    where,
)
from gpusched.client import connect
from gpusched.errors import UsageError
from gpusched.model.state_names import COMPACT
from gpusched.model.units import (
    format_amount,
    format_duration,
    format_size_mib,
    id_ranges,
    is_digits,
    plural,
    printable,
    span,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

    from rich.live import Live
    from rich.text import Text

    from gpusched.cli.parse import Values
    from gpusched.client import DaemonConnection


_VIEWS = {"save", "view", "views", "remove_view"}
_WATCH_S = 1.0
_WATCH_SHARE = 10
"""A long queue is refreshed after this multiple of the time the last answer took, to keep watching it cheap."""


def main() -> int:
    return output.run("gq", body)


def body(words: list[str]) -> int:
    table = gq_table()
    values, operands, _ = parse(table, words, operands_first=True)
    if output.common(table, values):
        return 0
    if not _VIEWS.isdisjoint(values):
        from gpusched.cli import views  # a queue without views pays nothing for them

        if "views" in values:
            return views.print_list(values)
        if "remove_view" in values:
            return views.remove(values["remove_view"])
        if "save" in values:
            views.save(table, values, words)
        else:
            values, operands = views.applied(table, values, operands)
    if operands:
        values["ids"] = [*values.get("ids", []), *operands]
    with connect() as client:
        if "why" in values:
            return _why(client, values)
        check_names(client, values.get("users", []), values.get("queues", []))
        if values.get("watch"):
            return _watch(client, values)
        found = view(client, values)
        if isinstance(found, dict):
            output.print_json(found)
        elif isinstance(found, bytearray):
            output.print_raw(found)
        else:
            tables.page(found, not (values.get("no_pager") or values.get("quiet")))
    return 0


def view(client: DaemonConnection, values: Values) -> str | bytearray | dict[str, Any]:
    """The jobs in the requested form: the text of a table, or the document of --json, parsed or as raw bytes."""
    asked = query(values)
    if values.get("tree"):
        for key in ("format", "sort", "start", "priority"):
            if key in values:
                raise UsageError(f"--tree has its own order and columns, so --{key} has no effect", "give one of them")
        from gpusched.cli.pipelines import tree_view  # rarely used

        return tree_view(client, asked, values)
    if values.get("start"):
        from gpusched.cli.forecast import starts_view  # rarely used

        return starts_view(client, asked, values)
    if values.get("priority"):
        return priorities_view(client, asked, values)
    if values.get("json"):
        if "sort" not in values and not sys.stdout.isatty():
            return client.raw(f"/v1/jobs?{asked}")
        answer = client.call("GET", f"/v1/jobs?{asked}")
        _sort_objects(answer["jobs"], values.get("sort", []))
        return answer
    if values.get("quiet"):
        rows = client.call("GET", f"/v1/jobs?fields=id&{asked}")["rows"]
        return "".join(f"{row[0]}\n" for row in rows)
    if "format" in values:
        from gpusched import entry_points  # the % language is rarely used

        form = entry_points.need("gq.format", "slurm", "gq --format")
        fields = ["id", *form.keys(values["format"]), *[key.lstrip("+-") for key in values.get("sort", ())]]
        rows = client.call("GET", f"/v1/jobs?fields={quote(','.join(fields))}&{asked}")["rows"]
        jobs = [dict(zip(fields, row)) for row in rows]  # noqa: B905  3.10 can, but the keyword costs
        _sort_objects(jobs, values.get("sort", []))
        text: str = form.render(values["format"], jobs, header=not values.get("noheader"))
        return text
    return _queue(client, asked, values)


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
    if is_digits(text):
        return 0, float(text), ""
    return (2 if value is None else 1), 0.0, text


def _queue(client: DaemonConnection, asked: str, values: Values) -> str:
    """The table; at a terminal with a summary line and notices."""
    now = time.time()
    is_long = bool(values.get("long"))
    # A column of sentences would leave too little width for them and for all others.
    is_below = is_long and tables.screen() is not None
    columns = _columns(now, is_long and not is_below)
    keys = [*(key for column in columns for key in column.keys.split()), *["reason_text"] * is_below]
    fields = list(dict.fromkeys([*keys, *(key.lstrip("+-") for key in values.get("sort", ()))]))
    for_people = "&summary=1&notices=1" if sys.stdout.isatty() else ""
    # With --sort, rows are folded here: only the client knows which job of a group comes first.
    is_folded, is_sorted = not (values.get("all_rows") or values.get("ids")), "sort" in values
    for_table = "&fold=1" if is_folded and not is_sorted else ""
    answer = client.call(
        "GET", f"/v1/jobs?order=queue&progress=1{for_table}{for_people}&fields={','.join(fields)}&{asked}"
    )
    output.note_missing("gq", answer)
    jobs = [dict(zip(fields, row)) for row in answer["rows"]]  # noqa: B905  3.10 can, but the keyword costs
    _sort_objects(jobs, values.get("sort", []))
    folded = answer.get("folded", {})
    if is_folded and is_sorted:
        jobs, folded = _fold(jobs)
    ids = {job["id"]: _shown_id(job, folded.get(job["id"])) for job in jobs}
    columns.insert(0, _id_column(ids))
    progress = answer.get("progress")
    if progress:
        columns.insert(-1, _progress_column(progress, now))
    sentence = (lambda job: printable(job["reason_text"] or "")) if is_below else None
    shown = tables.lines_of(columns, jobs, not values.get("noheader"), sentence)
    summary = answer.get("summary")
    if summary is not None:
        text = tables.folded(_summary(summary), 0)
        is_first = values.get("watch") or not jobs
        # With --watch the summary stays visible at the top.
        shown = [text, *(["", *shown] if jobs else ())] if is_first else [*shown, "", text]
    if answer.get("notices"):
        shown.append(tables.folded(notices_line(answer["notices"], now)))
    return "".join(f"{line}\n" for line in shown)


def _fold(jobs: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], dict[str, list[Any]]]:
    """Fold equal rows as the daemon does with `fold=1`: the first job of each group, and each group's ids by its id."""
    groups: dict[object, list[dict[str, Any]]] = {}
    for job in jobs:
        is_alone = job["state"] != "PENDING" or job["tasks_left"]
        key = job["id"] if is_alone else (job["user"], job["name"], job["gpu_request"], job["reason"])
        groups.setdefault(key, []).append(job)
    folded = {group[0]["id"]: [one["id"] for one in group] for group in groups.values() if len(group) > 1}
    ranges = {
        first: [id_ranges(tuple(map(int, one.split("_"))) for one in ids), len(ids)] for first, ids in folded.items()
    }
    return [group[0] for group in groups.values()], ranges


def _id_column(ids: dict[str, str]) -> tables.Column:
    # Ids are cut only if all other columns are at their minimum width.
    longest = max(map(len, ids.values()), default=0)
    return tables.Column(
        "ID", lambda job: ids[job["id"]], least=longest, short=lambda job: shorter_id(ids[job["id"]]), order=2
    )


def _progress_column(progress: dict[str, Any], now: float) -> tables.Column:
    def cell(make: Callable[[float, float | None, float], str]) -> Callable[[dict[str, Any]], str]:
        made = {job_id: make(fraction, eta_at, now) for job_id, (fraction, eta_at) in progress.items()}
        return lambda job: made.get(job["id"], "")

    return tables.Column("PROGRESS", cell(tables.bar), short=cell(tables.percentage), order=1, below=True)


def _columns(now: float, is_long: bool) -> list[tables.Column]:
    """The columns of the queue after the id. A column's keys are the job fields it reads, named as in --json."""
    waits: dict[float, str] = {}

    def cell_of_time(job: dict[str, Any]) -> str:
        if job["state"] != "PENDING":
            return elapsed(job, now)
        at = job["submit_at"]
        # Jobs of one submission have waited equally long.
        if at not in waits:
            waits[at] = elapsed(job, now)
        return waits[at]

    return [
        tables.Column("NAME", lambda job: printable(job["name"]), least=8, keys="id tasks_left throttle name"),
        tables.Column("USER", lambda job: printable(job["user"]), least=6, keys="user", order=4),
        tables.Column("ST", lambda job: COMPACT.get(job["state"], job["state"]), keys="state"),
        tables.Column(
            "TIME",
            cell_of_time,
            right=True,
            keys="state submit_at start_at end_at suspended_at suspended_s",
            short=lambda job: span(elapsed_s(job, now)),
            order=3,
        ),
        tables.Column("GPUS", lambda job: str(job["gpu_request"]), keys="gpu_request", order=5),
        tables.Column(
            "NODE/REASON",
            lambda job: printable(where(job, now, job["reason_text"] if is_long else None)),
            below=not is_long,
            keys="state node gpus idle_at reason" + " reason_text" * is_long,
        ),
    ]


def _shown_id(job: dict[str, Any], folded: list[Any] | None) -> str:
    if folded:
        return folded_ranges(*folded)
    return shown_id(job["id"], job["tasks_left"], job["throttle"]) if job["tasks_left"] else str(job["id"])


def _summary(found: dict[str, Any]) -> str:
    """`2 running, 10,503 pending, 3 of 8 GPUs free`."""
    states = dict(found["states"])
    active = ("RUNNING", "SUSPENDED", "COMPLETING", "PENDING")
    parts = [f"{states[state]:,} {state.lower()}" for state in active if states.get(state)]
    ended = sum(number for state, number in states.items() if state not in active)
    parts += [f"{ended:,} ended"] if ended else []
    gpus = found["gpus"]
    free = [f"{format_amount(found['gpus_free'])} of {plural(gpus, 'GPU')} free"] if gpus else []
    return ", ".join([*(parts or ["no jobs"]), *free])


def _why(client: DaemonConnection, values: Values) -> int:
    why = client.call("GET", f"/v1/jobs/{quote(values['why'])}/why")["why"]
    if values.get("json"):
        output.print_json({"why": why})
        return 0
    reason = f" ({why['reason']})" if why["reason"] not in (None, "None") else ""
    text = f": {printable(why['text'])}" if why["is_explained"] else ""
    variants, expected = why["facts"].pop("variants", ()), why["facts"].pop("variant", 0)
    if variants:
        text = f"; it starts with the first of its {len(variants)} variants that can start:"
    lines = [f"job {why['id']} is {why['state']}{reason}{text}"]
    for number, one in enumerate(variants):
        first = "next, " if number == expected and one["facts"].get("expected_at") is not None else ""
        lines.append(f"  {first}with {printable(one['request'])}: {printable(one['text'])}")
    from gpusched.cli.forecast import BOUNDS, note_age, why_lines

    note_age(why, time.time())
    for key, value in why["facts"].items():
        if value in (None, {}, []) or key in BOUNDS or (key == "expected_at" and why.get("start")):
            continue
        if key == "unavailable":
            lines += [f"  {key}: {printable(str(one['why']))}" for one in value]
            continue
        lines.append(f"  {printable(str(key))}: {printable(_fact(key, value))}")
    lines += [f"  {printable(line)}" for line in why_lines(why, time.time())]
    sys.stdout.write("".join(f"{tables.folded(line)}\n" for line in lines))
    return 0


def _fact(key: str, value: object) -> str:
    if key.endswith("_at") and isinstance(value, (int, float)):
        return time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(value))
    if key.endswith("_mib") and isinstance(value, (int, float)):
        return format_size_mib(value)
    if isinstance(value, float):
        return format_amount(value)
    if isinstance(value, list):
        return ", ".join(str(item) for item in value)
    if isinstance(value, dict):
        said = ((name, item) for name, item in value.items() if item not in (None, [], {}))
        return ", ".join(f"{name} {_fact(str(name), item)}" for name, item in said)
    return str(value)


def _watch(client: DaemonConnection, values: Values) -> int:
    """Redraw repeatedly: at a terminal a frame that fits it, in a pipe one output after the other."""
    is_bare = any(values.get(key) for key in ("json", "quiet", "format"))
    is_queue = not any(values.get(key) for key in ("tree", "start", "priority"))
    is_drawn = tables.is_drawn() and not is_bare
    clock = "" if is_bare else "%H:%M:%S  " if is_queue and sys.stdout.isatty() else "%H:%M:%S\n"
    live = _screen() if is_drawn else None
    try:
        while True:
            began = time.monotonic()
            found = view(client, values)
            took_s = time.monotonic() - began
            if isinstance(found, dict):
                sys.stdout.write(output.json_line(found))
            elif isinstance(found, bytearray):
                output.print_raw(found)
            elif live is not None:
                live.update(_frame(time.strftime(clock) + found), refresh=True)
            else:
                sys.stdout.write(time.strftime(clock) + found)
            sys.stdout.flush()
            time.sleep(max(_WATCH_S, _WATCH_SHARE * took_s))
    except KeyboardInterrupt:
        return 0
    finally:
        if live is not None:
            live.stop()


def _screen() -> Live:
    """The display that redraws frames in place; loaded only with --watch."""
    from rich.console import Console
    from rich.live import Live

    console = Console(highlight=False)
    console.clear()
    live = Live(console=console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False)
    live.start()
    return live


def _frame(text: str) -> Text:
    """The part of a text that fits the terminal. Long lines are cut at its edge."""
    from rich.text import Text

    lines = text.splitlines()
    height, _ = tables.screen() or (len(lines), 0)
    left = len(lines) - (height - 2)
    if left > 1:
        lines = [*lines[: height - 2], f"and {left:,} more lines; all of them: gq"]
    return Text.from_ansi("\n".join(lines), no_wrap=True, overflow="crop")


def priorities_view(client: DaemonConnection, asked: str, values: Values) -> str | dict[str, Any]:
    """`gq --priority`: one line per pending job, one column per factor; with --json the document."""
    if values.get("json"):
        return client.call("GET", f"/v1/priorities?{asked}")
    answer = client.call("GET", f"/v1/priorities?shared=1&{asked}")
    if values.get("quiet"):
        return "".join(f"{job_id}\n" for job_id, _ in answer["jobs"])
    columns = [
        tables.Column("USER", lambda row: printable(row["user"]), order=1),
        *(_responses() if answer["order"] == "response_ratio" else _weights(answer["priorities"])),
        tables.Column("TIER", lambda row: str(row["tier"]), right=True, order=2),
    ]
    if answer["order"] not in ("multifactor", "response_ratio"):
        output.note("gq", f"the queue is ordered by {answer['order']}, not by the sum of these parts")
    # Most jobs of a long queue have the row of others.
    cells = tables.rows_of(columns, answer["priorities"])
    rows = [(str(job_id), *cells[number]) for job_id, number in answer["jobs"]]
    lines = tables.lines_of_cells([tables.Column("ID", str), *columns], rows, header=not values.get("noheader"))
    return "".join(f"{line}\n" for line in lines)


def _weights(rows: list[dict[str, Any]]) -> list[tables.Column]:
    # Plug-ins may add a factor for some jobs only.
    parts = dict.fromkeys(part for row in rows for part in row["parts"])
    return [
        tables.Column("PRIORITY", lambda row: f"{row['priority']:.1f}", right=True),
        *(tables.Column(part.upper(), _part(part), right=True) for part in parts),
    ]


def _part(name: str) -> Callable[[dict[str, Any]], str]:
    return lambda row: f"{row['parts'].get(name, 0.0):.1f}"


def _responses() -> list[tables.Column]:
    """The parts of each job's position in the order `response_ratio`; `-` for jobs that are not eligible."""
    from gpusched.cli.forecast import instant

    now = time.time()
    # Both are the same for all jobs that were submitted together.
    expected = _remembered(lambda length_s: "unknown" if length_s is None else format_duration(length_s))
    next_at = _remembered(lambda at: "next" if at <= now else instant(at, now))

    def column(title: str, cell: Callable[[dict[str, Any]], str], right: bool = True, order: int = 0) -> tables.Column:
        return tables.Column(
            title, lambda row: "-" if row["response"] is None else cell(row["response"]), right=right, order=order
        )

    return [
        column("SHARE", lambda found: f"{found['share']:.2f}"),
        column("TURN", lambda found: str(found["turn"]), order=5),
        column("WAITED", lambda found: format_duration(found["waited_s"])),
        column("EXPECTED", lambda found: expected(found["expected_s"]), order=6),
        column("URGENCY", lambda found: f"{found['urgency']:.2f}", order=3),
        column("RATIO", lambda found: f"{found['ratio']:.2f}"),
        column(
            "RESERVED",
            lambda found: "yes" if found["is_reserved"] else next_at(found["reserves_at"]),
            right=False,
            order=4,
        ),
    ]


def _remembered(make: Callable[[Any], str]) -> Callable[[Any], str]:
    """A function that makes each text once."""
    known: dict[object, str] = {}

    def text(value: Any) -> str:
        found = known.get(value)
        if found is None:
            found = known[value] = make(value)
        return found

    return text


_MOST = 3


def notices_line(notices: Sequence[dict[str, Any]], now: float) -> str:
    """The first notices for all users, on one line; the rest is only counted, see `ginfo`."""
    texts = [_text(one, now) for one in notices[:_MOST]]
    if len(notices) > _MOST:
        texts.append(f"and {len(notices) - _MOST} more, see ginfo")
    return printable("; ".join(texts))


def _text(one: dict[str, Any], now: float) -> str:
    why = f" ({one['message']})" if one["message"] else ""
    if one["kind"] == "drain":
        return f"{one['what']} is drained{why}"
    if one["kind"] == "pause":
        return f"{one['what']} is paused{why}"
    head = f"maintenance {one['name']} on {one['what']}"
    if one["start_at"] <= now:
        return f"{head} until {_at(one['end_at'], now)}{why}"
    return f"{head} from {_at(one['start_at'], now)} to {_at(one['end_at'], one['start_at'])}{why}"


def _at(at: float, near: float) -> str:
    """The time of day, with the date if the day differs from that of `near`."""
    there = time.localtime(at)
    is_same_day = there[:3] == time.localtime(near)[:3]
    return time.strftime("%H:%M" if is_same_day else "%a %Y-%m-%d %H:%M", there)
