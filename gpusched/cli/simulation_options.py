"""Options of all commands that replay jobs: which jobs, on which machines, by which of the two ways."""

from __future__ import annotations

from typing import Annotated

import typer

Trace = Annotated[
    str | None,
    typer.Argument(metavar="[TRACE]", help="A log in SWF, a table (CSV) of GPU jobs, or what sacct -P prints."),
]
Nodes = Annotated[
    str | None,
    typer.Option("--nodes", metavar="SHAPE", help="8x8xA100: nodes, GPUs of each, model; 100p: that many processors."),
]
Cluster = Annotated[
    str | None, typer.Option("--cluster", metavar="FILE", help="Nodes from a file, JSON or the table of openb.")
]
Predict = Annotated[
    str | None,
    typer.Option("--predict", metavar="NAME", help="How run times are guessed under policies that name no way."),
]
Exact = Annotated[bool, typer.Option("--exact", help="Estimates are the run times.")]
Rules = Annotated[
    str | None,
    typer.Option(
        "--rules",
        metavar="KIND",
        help="By which every start is determined: swf, rigid jobs on processors, or gang, whole GPUs on nodes, run "
        "times known; what leaves a start open is refused.",
    ),
]
Rows = Annotated[
    list[str] | None,
    typer.Option(
        "--rows", metavar="FIRST:COUNT", help="Of the trace so many jobs from this one on; again for further parts."
    ),
]
FromHistory = Annotated[
    bool, typer.Option("--from-history", help="The jobs that gpusched itself has run here; goes by --tick.")
]
Since = Annotated[
    str | None, typer.Option("--since", metavar="WHEN", help="Of the history, those submitted since: 30d, a date.")
]
Tick = Annotated[
    bool,
    typer.Option(
        "--tick", help="Let all that the daemon does happen: admission, failures, retries, preemption. Slower."
    ),
]
FailRate = Annotated[
    float, typer.Option("--fail-rate", metavar="PART", help="So many runs of 1 fail whose end is not known.")
]
Retries = Annotated[
    int, typer.Option("--retries", metavar="N", help="How often a failed job of a trace is tried again.")
]
