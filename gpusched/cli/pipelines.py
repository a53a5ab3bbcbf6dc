"""gshow p42: the state of a pipeline, its source, and its steps as a graph."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gpusched.cli import output, tables
from gpusched.cli.query import elapsed, quote, where
from gpusched.cli.tables import Column
from gpusched.client import connect
from gpusched.errors import UsageError
from gpusched.instants import instant
from gpusched.model.state_names import COMPACT
from gpusched.model.units import parse_pipeline_id, printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    from gpusched.cli.parse import Values
    from gpusched.client import DaemonConnection

    Job = dict[str, Any]

_FIELDS = (
    *("id", "name", "user", "state", "submit_at", "start_at", "end_at", "suspended_at", "suspended_s"),
    *("gpu_request", "node", "gpus", "reason", "reason_text", "dependency", "depends_on", "pipeline", "step"),
    "fallback_of",
)
DEEPEST = 20
"""Nodes below this level are not indented further, so that a chain of a thousand jobs fits."""

ROUND = ("├─ ", "└─ ", "│  ", "   ")
PLAIN = ("|- ", "`- ", "|  ", "   ")


class TreeRow:
    """A job in the tree, or the pipeline above its steps."""

    __slots__ = ("depth", "is_job", "job", "parent", "prefix")

    def __init__(self, job: Job, depth: int, parent: str | None, prefix: str) -> None:
        self.job = job
        self.depth = depth
        self.parent = parent
        self.prefix = prefix
        self.is_job = "state" in job


def tree_view(client: DaemonConnection, asked: str, values: Values) -> str | dict[str, Any]:
    """The selected jobs as a tree, or the document of --json."""
    answer = client.call("GET", f"/v1/jobs?fields={','.join(_FIELDS)}&{asked}")
    jobs = [dict(zip(_FIELDS, row)) for row in answer["rows"]]  # noqa: B905  3.10 can, but the keyword costs
    names = list(dict.fromkeys(job["pipeline"] for job in jobs if job["pipeline"]))
    found = []
    if names:
        found = client.call("GET", f"/v1/pipelines?ids={quote(','.join(names))}")["pipelines"]
    places = arrange(jobs, signs())
    shown = [{**place.job, "depth": place.depth, "parent": place.parent} for place in places if place.is_job]
    bare = output.for_programs(values, {"jobs": shown, "pipelines": found}, (job["id"] for job in shown))
    if bare is not None:
        return bare
    output.note_missing("gq", answer)
    return tree_text(places, found, header=not values.get("noheader"), is_long=bool(values.get("long")))


def tree_text(
    places: Sequence[TreeRow], pipelines: Sequence[dict[str, Any]], header: bool = True, is_long: bool = False
) -> str:
    """A table whose first column draws the tree."""
    known = {one["id"]: one for one in pipelines}
    now = time.time()

    def column(title: str, cell: Callable[[Job], str], least: int | None = None, order: int = 0) -> Column:
        """A column of jobs; empty for pipelines."""
        return Column(title, lambda place: cell(place.job) if place.is_job else "", least=least, order=order)

    def shared(title: str, key: str, least: int, order: int = 0) -> Column:
        """A column of jobs and pipelines."""
        return Column(
            title, lambda at: printable((at.job if at.is_job else known[at.job["id"]])[key]), least=least, order=order
        )

    def at_end(place: TreeRow) -> str:
        if not place.is_job:
            return standing(known[place.job["id"]])
        return printable(where(place.job, now, place.job["reason_text"] if is_long else None))

    columns = [
        Column("ID", lambda place: f"{place.prefix}{place.job['id']}"),
        shared("NAME", "name", 8),
        shared("USER", "user", 6, order=2),
        column("ST", lambda job: COMPACT.get(job["state"], "?")),
        column("TIME", lambda job: elapsed(job, now)),
        column("GPUS", lambda job: str(job["gpu_request"]), order=1),
        column("AFTER", _after, least=6, order=3),
        Column("NODE/REASON", at_end, below=True),
    ]
    return tables.listing(columns, places, header=header)


def _after(job: Job) -> str:
    return printable(job["dependency"] or (f"failed:{job['fallback_of']}" if job["fallback_of"] else ""), 40)


def standing(pipeline: Mapping[str, Any]) -> str:
    """State and progress of a pipeline: `RUNNING, 2 of 5 steps completed`."""
    counts, total = pipeline["counts"], pipeline["steps_total"]
    text = f"{pipeline['state']}, {counts.get('COMPLETED', 0)} of {total} {'step' if total == 1 else 'steps'} completed"
    text += f", {pipeline['not_needed']} not needed" if pipeline["not_needed"] else ""
    tried = ", ".join(f"{number} {state}" for state, number in pipeline["fallback_counts"].items())
    return text + (f"; fallbacks: {tried}" if tried else "")


def signs() -> tuple[str, str, str, str]:
    """Line-drawing characters if the terminal supports them, otherwise ASCII."""
    encoding = (getattr(sys.stdout, "encoding", None) or "").lower().replace("-", "")
    return ROUND if sys.stdout.isatty() and encoding == "utf8" else PLAIN


def arrange(jobs: Sequence[Job], drawn: tuple[str, str, str, str] = PLAIN) -> list[TreeRow]:
    """The jobs in tree order, grouped by pipeline.

    Each job appears once: below the dependency that ends the longest path from a job without dependencies here.
    """
    by_id = {job["id"]: job for job in jobs}
    # A dependent of an array is shown below the last of its tasks that have rows.
    last = {job["id"].partition("_")[0]: job["id"] for job in jobs}
    parents = {job["id"]: _parents(job, by_id, last) for job in jobs}
    depths = _depths(parents)
    roots: list[str] = []
    children: dict[str, list[str]] = {}
    for job_id, above in parents.items():
        pipeline = by_id[job_id]["pipeline"]
        if above:
            # Of equally deep ones the last: most likely to finish last.
            children.setdefault(max(above, key=lambda one: (depths[one], len(one), one)), []).append(job_id)
        elif pipeline:
            if pipeline not in by_id:
                by_id[pipeline] = {"id": pipeline}
                roots.append(pipeline)
            children.setdefault(pipeline, []).append(job_id)
        else:
            roots.append(job_id)
    found: list[TreeRow] = []
    stack: list[tuple[str, str | None, int, str, str]] = [(job_id, None, 0, "", "") for job_id in reversed(roots)]
    tee, corner, bar, gap = drawn
    while stack:
        job_id, parent, depth, prefix, below = stack.pop()
        found.append(TreeRow(by_id[job_id], depth, parent, prefix))
        under = children.get(job_id, [])
        for at, child in reversed(list(enumerate(under))):
            is_last = at == len(under) - 1
            if depth >= DEEPEST:
                stack.append((child, job_id, depth + 1, below + (corner if is_last else tee), below))
            else:
                line = below + (corner if is_last else tee)
                stack.append((child, job_id, depth + 1, line, below + (gap if is_last else bar)))
    return found


def _parents(job: Job, known: Mapping[str, Job], last: Mapping[str, str]) -> list[str]:
    """Dependencies of the job, and the job it is a fallback of, that are shown and belong to the same pipeline."""
    named = [*job["depends_on"], *([job["fallback_of"]] if job["fallback_of"] else ())]
    above = [one if one in known else last.get(one.partition("_")[0], "") for one in named]
    return [one for one in above if one and known[one]["pipeline"] == job["pipeline"]]


def _depths(parents: Mapping[str, Sequence[str]]) -> dict[str, int]:
    """The length of the longest path to each job from one without dependencies."""
    left = {job_id: len(above) for job_id, above in parents.items()}
    below: dict[str, list[str]] = {}
    for job_id, above in parents.items():
        for one in above:
            below.setdefault(one, []).append(job_id)
    depths = {job_id: 0 for job_id, count in left.items() if not count}
    ready = list(depths)
    for job_id in ready:
        for child in below.get(job_id, ()):
            depths[child] = max(depths.get(child, 0), depths[job_id] + 1)
            left[child] -= 1
            if not left[child]:
                ready.append(child)  # extends the list being iterated
    return depths


_COLOURS = {
    "COMPLETED": "#b7e1cd",
    "RUNNING": "#a4c2f4",
    "PENDING": "#fff2cc",
    "CANCELLED": "#d9d9d9",
    "FAILED": "#f4b6b6",
}
"""Colours of nodes; states without one use that of FAILED if final, otherwise that of RUNNING."""
_LIVE = ("RUNNING", "COMPLETING", "SUSPENDED")


def show(asked: Sequence[str], values: dict[str, Any]) -> int:
    """Show these pipelines in turn. Raises: UsageError if one of them is a job."""
    for word in asked:
        if parse_pipeline_id(word) is None:
            what = "--graph applies to pipelines" if "graph" in values else "jobs and pipelines are shown separately"
            raise UsageError(f"{what}, and {printable(word, 40)!r} is not a pipeline", "for example: gshow p42")
    with connect() as client:
        found = [client.call("GET", f"/v1/pipelines/{quote(word)}")["pipeline"] for word in asked]
    if values.get("script"):
        for one in found:
            sys.stdout.buffer.write(one["source"].encode("utf-8", "surrogateescape"))
    elif "graph" in values:
        draw = mermaid if values["graph"] == "mermaid" else dot
        sys.stdout.write("\n".join(draw(one) for one in found))
    elif not output.show(values, {"pipelines": found}, ()):
        for at, one in enumerate(found):
            sys.stdout.write("\n" if at else "")
            _describe(one)
    return 0


def _describe(pipeline: dict[str, Any]) -> None:
    counts = ", ".join(f"{number} {state}" for state, number in pipeline["counts"].items())
    pairs = [
        ("Pipeline", f"{pipeline['id']} ({pipeline['name']})"),
        ("User", pipeline["user"]),
        ("Submitted", instant(pipeline["submit_at"])),
        ("State", standing(pipeline)),
        ("Steps", counts),
    ]
    sys.stdout.write("".join(f"{name + ':':<11} {printable(value)}\n" for name, value in pairs))
    sys.stdout.write(tree_text(arrange([*pipeline["steps"], *_fallbacks(pipeline)], signs()), [pipeline], is_long=True))


def _fallbacks(pipeline: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The fallbacks attached to their step: a fallback of an array belongs to a task, which is not shown."""
    now = {step["step"]: step["id"] for step in pipeline["steps"]}
    return [{**job, "depends_on": [now[job["step"]]]} for job in pipeline["fallbacks"]]


def _edges(pipeline: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Source, target and label of each edge; the label is empty for afterok."""
    found = []
    for step in pipeline["steps"]:
        for need in step["needs"]:
            if need["step"] is not None:
                delay = f" + {need['delay_s'] // 60} min" if need["delay_s"] else ""
                label = "" if need["kind"] == "afterok" else need["kind"] + delay
                found.append((need["step"], step["step"], label))
    return found


def _colour(step: Mapping[str, Any]) -> str:
    state = step["state"]
    return _COLOURS.get(state) or _COLOURS["RUNNING" if state in _LIVE else "FAILED"]


def mermaid(pipeline: Mapping[str, Any]) -> str:
    """The graph in Mermaid syntax. Nodes are renamed, since Mermaid reserves some words."""
    nodes = {step["step"]: f"s{number}" for number, step in enumerate(pipeline["steps"], 1)}
    lines = ["flowchart TD"]
    for step in pipeline["steps"]:
        text = f"{step['step']}<br/>{step['id']} {step['state']}"
        lines.append(f'    {nodes[step["step"]]}["{text}"]')
    fallbacks = {f"f{number}": job for number, job in enumerate(pipeline["fallbacks"], 1)}
    for node, job in fallbacks.items():
        lines.append(f'    {node}(["{job["step"]}: fallback<br/>{job["id"]} {job["state"]}"])')
    for above, below, label in _edges(pipeline):
        said = f"|{label}|" if label else ""
        lines.append(f"    {nodes[above]} -->{said} {nodes[below]}")
    lines += [f"    {nodes[job['step']]} -.-> {node}" for node, job in fallbacks.items()]
    lines += [f"    style {nodes[step['step']]} fill:{_colour(step)}" for step in pipeline["steps"]]
    lines += [f"    style {node} fill:{_colour(job)}" for node, job in fallbacks.items()]
    return "\n".join(lines) + "\n"


def dot(pipeline: Mapping[str, Any]) -> str:
    """The graph in Graphviz syntax."""
    lines = [f"digraph {_quoted(pipeline['name'])} {{", '    node [shape=box, style="rounded,filled"];']
    for step in pipeline["steps"]:
        label = f"{step['step']}\\n{step['id']} {step['state']}"
        lines.append(f'    {_quoted(step["step"])} [label="{label}", fillcolor="{_colour(step)}"];')
    for job in pipeline["fallbacks"]:
        # Cannot clash with a step: names contain no blanks.
        node, label = f"fallback {job['id']}", f"{job['step']}: fallback\\n{job['id']} {job['state']}"
        lines.append(f'    {_quoted(node)} [label="{label}", fillcolor="{_colour(job)}"];')
        lines.append(f"    {_quoted(job['step'])} -> {_quoted(node)} [style=dashed];")
    for above, below, label in _edges(pipeline):
        said = f" [label={_quoted(label)}]" if label else ""
        lines.append(f"    {_quoted(above)} -> {_quoted(below)}{said};")
    return "\n".join([*lines, "}"]) + "\n"


def _quoted(text: str) -> str:
    shown = printable(text).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{shown}"'
