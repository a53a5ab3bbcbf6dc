"""gshow p42: where a pipeline stands, its text, and its steps as a graph."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from gpusched.cli import output
from gpusched.cli.query import quote
from gpusched.cli.tree import arrange, signs, standing, tree_text
from gpusched.client import connect
from gpusched.errors import UsageError
from gpusched.instants import instant
from gpusched.model.units import parse_pipeline_id, printable

_COLOURS = {
    "COMPLETED": "#b7e1cd",
    "RUNNING": "#a4c2f4",
    "PENDING": "#fff2cc",
    "CANCELLED": "#d9d9d9",
    "FAILED": "#f4b6b6",
}
"""Of nodes; states that are not named look like FAILED when they are final, else like RUNNING."""
_LIVE = ("RUNNING", "COMPLETING", "SUSPENDED")


def show(asked: Sequence[str], values: Mapping[str, Any]) -> int:
    """Show these pipelines one after the other. Raises: UsageError when one of them is a job."""
    for word in asked:
        if parse_pipeline_id(word) is None:
            what = "--graph is of pipelines" if "graph" in values else "jobs and pipelines are shown one or the other"
            raise UsageError(f"{what}, and {printable(word, 40)!r} is none", "for example: gshow p42")
    with connect() as client:
        found = [client.call("GET", f"/v1/pipelines/{quote(word)}")["pipeline"] for word in asked]
    if values.get("script"):
        for one in found:
            sys.stdout.buffer.write(one["source"].encode("utf-8", "surrogateescape"))
    elif "graph" in values:
        draw = mermaid if values["graph"] == "mermaid" else dot
        sys.stdout.write("\n".join(draw(one) for one in found))
    elif values.get("json"):
        output.print_json({"pipelines": found})
    else:
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
    """The fallbacks, each of its step: of an array it is one of a task, which is not shown."""
    now = {step["step"]: step["id"] for step in pipeline["steps"]}
    return [{**job, "depends_on": [now[job["step"]]]} for job in pipeline["fallbacks"]]


def _edges(pipeline: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """From, to, and what the edge says: nothing for afterok."""
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
    """The graph in Mermaid's words. Nodes have names of their own: Mermaid keeps some words to itself."""
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
    """The graph in Graphviz's words."""
    lines = [f"digraph {_quoted(pipeline['name'])} {{", '    node [shape=box, style="rounded,filled"];']
    for step in pipeline["steps"]:
        label = f"{step['step']}\\n{step['id']} {step['state']}"
        lines.append(f'    {_quoted(step["step"])} [label="{label}", fillcolor="{_colour(step)}"];')
    for job in pipeline["fallbacks"]:
        # No step can be called so: names have no blank.
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
