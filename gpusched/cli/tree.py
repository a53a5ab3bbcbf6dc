"""gq --tree: jobs below those that they wait for, and pipelines with their steps."""

from __future__ import annotations

import sys
import time

from gpusched.cli import output, tables
from gpusched.cli.query import COMPACT, elapsed, quote, where
from gpusched.model.units import printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    from gpusched.cli.parse import Values
    from gpusched.client import Client

    Job = dict[str, Any]

_FIELDS = (
    *("id", "name", "user", "state", "start_at", "end_at", "suspended_at", "suspended_s", "gpu_request", "node"),
    *("gpus", "reason", "reason_text", "dependency", "depends_on", "pipeline", "step", "fallback_of"),
)
DEEPEST = 20
"""Below this level nothing is moved further to the right: a chain of a thousand jobs has to fit as well."""

ROUND = ("├─ ", "└─ ", "│  ", "   ")
PLAIN = ("|- ", "`- ", "|  ", "   ")


class Place:
    """A job in the tree, or the pipeline above its steps."""

    __slots__ = ("depth", "is_job", "job", "parent", "prefix")

    def __init__(self, job: Job, depth: int, parent: str | None, prefix: str) -> None:
        self.job = job
        self.depth = depth
        self.parent = parent
        self.prefix = prefix
        self.is_job = "state" in job


def tree_view(client: Client, asked: str, values: Values) -> str | dict[str, Any]:
    """The jobs of the query as a tree, or its document."""
    answer = client.call("GET", f"/v1/jobs?fields={','.join(_FIELDS)}&{asked}")
    jobs = [dict(zip(_FIELDS, row)) for row in answer["rows"]]  # noqa: B905  3.10 can, but the keyword costs
    names = list(dict.fromkeys(job["pipeline"] for job in jobs if job["pipeline"]))
    found = []
    if names:
        found = client.call("GET", f"/v1/pipelines?ids={quote(','.join(names))}")["pipelines"]
    places = arrange(jobs, signs())
    if values.get("json"):
        shown = [{**place.job, "depth": place.depth, "parent": place.parent} for place in places if place.is_job]
        return {"jobs": shown, "pipelines": found}
    if values.get("quiet"):
        return "".join(f"{place.job['id']}\n" for place in places if place.is_job)
    output.note_missing("gq", answer)
    return tree_text(places, found, header=not values.get("noheader"), is_long=bool(values.get("long")))


_TITLES = ("ID", "NAME", "USER", "ST", "TIME", "GPUS", "AFTER", "NODE/REASON")


def tree_text(
    places: Sequence[Place], pipelines: Sequence[dict[str, Any]], header: bool = True, is_long: bool = False
) -> str:
    """A table whose first column is drawn as a tree."""
    known = {one["id"]: one for one in pipelines}
    now = time.time()
    rows = [_row(place, now, is_long) if place.is_job else _pipeline_row(known[place.job["id"]]) for place in places]
    lines = tables.table(_TITLES, rows, header=header, cut={1: 6, 2: 6, 6: 6, **({} if is_long else {7: 12})})
    return "".join(f"{line}\n" for line in lines)


def _pipeline_row(pipeline: dict[str, Any]) -> tuple[str, ...]:
    name, user = printable(pipeline["name"]), printable(pipeline["user"])
    return (pipeline["id"], name, user, "", "", "", "", standing(pipeline))


def standing(pipeline: Mapping[str, Any]) -> str:
    """Where a pipeline stands, in words: `RUNNING, 2 of 5 steps completed`."""
    counts, total = pipeline["counts"], pipeline["steps_total"]
    text = f"{pipeline['state']}, {counts.get('COMPLETED', 0)} of {total} {'step' if total == 1 else 'steps'} completed"
    text += f", {pipeline['not_needed']} not needed" if pipeline["not_needed"] else ""
    tried = ", ".join(f"{number} {state}" for state, number in pipeline["fallback_counts"].items())
    return text + (f"; fallbacks: {tried}" if tried else "")


def _row(place: Place, now: float, is_long: bool) -> tuple[str, ...]:
    job = place.job
    return (
        f"{place.prefix}{job['id']}",
        printable(job["name"]),
        printable(job["user"]),
        COMPACT.get(job["state"], "?"),
        elapsed(job, now),
        str(job["gpu_request"]),
        printable(job["dependency"] or (f"failed:{job['fallback_of']}" if job["fallback_of"] else ""), 40),
        printable(where(job, now, job["reason_text"] if is_long else None)),
    )


def signs() -> tuple[str, str, str, str]:
    """Lines for a terminal that can draw them, else signs of ASCII."""
    encoding = (getattr(sys.stdout, "encoding", None) or "").lower().replace("-", "")
    return ROUND if sys.stdout.isatty() and encoding == "utf8" else PLAIN


def arrange(jobs: Sequence[Job], drawn: tuple[str, str, str, str] = PLAIN) -> list[Place]:
    """The jobs in the order of the tree, those of each pipeline together.

    Each job is once in it: below the one that ends its longest way from a job that waits for none of these.
    """
    by_id = {job["id"]: job for job in jobs}
    # Whoever waits for an array is shown below the last of its tasks, where it has rows for those.
    last = {job["id"].partition("_")[0]: job["id"] for job in jobs}
    parents = {job["id"]: _parents(job, by_id, last) for job in jobs}
    depths = _depths(parents)
    roots: list[str] = []
    children: dict[str, list[str]] = {}
    for job_id, above in parents.items():
        pipeline = by_id[job_id]["pipeline"]
        if above:
            # Among equally deep ones the last: most likely the one that is missing when the others have ended.
            children.setdefault(max(above, key=lambda one: (depths[one], len(one), one)), []).append(job_id)
        elif pipeline:
            if pipeline not in by_id:
                by_id[pipeline] = {"id": pipeline}
                roots.append(pipeline)
            children.setdefault(pipeline, []).append(job_id)
        else:
            roots.append(job_id)
    found: list[Place] = []
    stack: list[tuple[str, str | None, int, str, str]] = [(job_id, None, 0, "", "") for job_id in reversed(roots)]
    tee, corner, bar, gap = drawn
    while stack:
        job_id, parent, depth, prefix, below = stack.pop()
        found.append(Place(by_id[job_id], depth, parent, prefix))
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
    """Those of the jobs that it waits for, or is the fallback of, which are shown, and are of the same pipeline."""
    named = [*job["depends_on"], *([job["fallback_of"]] if job["fallback_of"] else ())]
    above = [one if one in known else last.get(one.partition("_")[0], "") for one in named]
    return [one for one in above if one and known[one]["pipeline"] == job["pipeline"]]


def _depths(parents: Mapping[str, Sequence[str]]) -> dict[str, int]:
    """The longest way to each job from one that waits for none."""
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
                ready.append(child)  # the walk goes on over what it finds
    return depths
