"""gpusched tune: searches for weights that serve a goal, and validates them on jobs held out from the search."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gpusched.cli import output, tables
from gpusched.errors import UsageError
from gpusched.model.units import printable
from gpusched.model.value import replace

if TYPE_CHECKING:
    from gpusched.addons.simulate.comparison import SignFlipResult
    from gpusched.addons.simulate.outcome import Outcome
    from gpusched.addons.simulate.simulation import Simulation, SimulationRequest
    from gpusched.addons.simulate.trace import TraceJob
    from gpusched.addons.simulate.tuning import Objective, Score
    from gpusched.model.planner_settings import PrioritySettings
    from gpusched.model.settings import Settings


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
    typer.Option("--predict", metavar="NAME", help="How policies predict run times unless they name a method."),
]
Exact = Annotated[bool, typer.Option("--exact", help="Use the run times as estimates.")]
Rules = Annotated[
    str | None,
    typer.Option(
        "--rules",
        metavar="KIND",
        help="Rules that determine every start: swf (rigid jobs on processors) or gang (whole GPUs on nodes, run "
        "times known); anything ambiguous is refused.",
    ),
]
Rows = Annotated[
    list[str] | None,
    typer.Option("--rows", metavar="FIRST:COUNT", help="COUNT jobs of the trace from row FIRST on; repeatable."),
]
FromHistory = Annotated[
    bool, typer.Option("--from-history", help="Replay the jobs that gpusched has run here; implies --tick.")
]
Since = Annotated[
    str | None, typer.Option("--since", metavar="WHEN", help="Only jobs of the history submitted since: 30d, a date.")
]
Tick = Annotated[
    bool,
    typer.Option("--tick", help="Simulate the whole daemon: admission, failures, retries, preemption. Slower."),
]
FailRate = Annotated[
    float, typer.Option("--fail-rate", metavar="PART", help="Fraction of the runs with unknown outcome that fail.")
]
Retries = Annotated[int, typer.Option("--retries", metavar="N", help="How often a failed job of a trace is retried.")]


TODAY, PLAIN, FOUND = "today", "fcfs+easy", "found"


def tune(
    trace: Trace = None,
    nodes: Nodes = None,
    cluster: Cluster = None,
    goal: Annotated[
        str,
        typer.Option(
            "--goal",
            metavar="TEXT",
            help="A measure to minimise, and others with a limit: 'wait_p95 of small, slowdown_mean of wide <= 20'.",
        ),
    ] = "",
    tries: Annotated[
        int, typer.Option("--tries", metavar="N", help="How many settings to try besides the presets.")
    ] = 40,
    hold_out: Annotated[
        float, typer.Option("--hold-out", metavar="PART", help="Fraction of the jobs, the last ones, to report on.")
    ] = 0.3,
    config: Annotated[
        str | None,
        typer.Option("--config", metavar="FILE", help="Current settings; default: those in force on this machine."),
    ] = None,
    predict: Predict = None,
    exact: Exact = False,
    rows: Rows = None,
    from_history: FromHistory = False,
    since: Since = None,
    tick: Tick = False,
    fail_rate: FailRate = 0.0,
    retries: Retries = 0,
    seed: Annotated[
        int,
        typer.Option("--seed", metavar="N", help="Seed for the settings tried and the runs that fail."),
    ] = 0,
    write: Annotated[
        str | None,
        typer.Option(
            "--write", metavar="FILE", help="Write the section [priority] there if it is better than the current one."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document with schema_version.")] = False,
) -> None:
    """Search [priority] for a goal on the first part of a trace, presets first, and report on the rest.

    Exit code 0 if the settings found are better on the rest beyond chance, 1 if the current ones should stay.

    example: gpusched tune kth_sp2.swf.gz --rows 0:3000 --goal 'slowdown_mean of width<=4, wait_p95 of wide <= 12h'
    """
    from gpusched.addons.simulate.daemon_run import Mishaps
    from gpusched.addons.simulate.policies import DEFAULT, PRESENT
    from gpusched.addons.simulate.simulation import SimulationRequest
    from gpusched.addons.simulate.tuning import GOAL_EXAMPLE, objective_of

    if not goal:
        raise UsageError("no goal is given", GOAL_EXAMPLE)
    if tries < 1:
        raise UsageError(f"--tries {tries} is less than 1", "--tries 40")
    file = None if write is None else _writable(write)
    asked = SimulationRequest(
        trace=trace,
        nodes=nodes,
        cluster=cluster,
        policies=(PRESENT if config is None else DEFAULT,),
        is_exact=exact,
        predict=predict,
        from_history=from_history,
        since=since,
        config=config,
        tick=tick,
        rows=rows or (),
        mishaps=Mishaps(fail_rate, seed, retries),
    )
    _tune(asked, objective_of(goal), tries, hold_out, seed, file, as_json)


def _writable(path: str) -> Path:
    file = Path(path)
    if file.exists():
        raise UsageError(f"{path} already exists and is not overwritten", "name a new file: --write priority.toml")
    if not file.absolute().parent.is_dir():
        raise UsageError(f"there is no folder for {path}", f"mkdir -p {file.parent}")
    return file


@dataclass(frozen=True, slots=True)
class _Report:
    """Results of a search."""

    goal: Objective
    tries: int
    seed: int
    jobs: tuple[int, int]
    """Numbers of jobs searched on and held out."""
    priority: PrioritySettings
    today: PrioritySettings
    searched: Mapping[str, Score]
    held_out: Mapping[str, Score]
    verdict: SignFlipResult
    """Test of the found settings against the current ones, over parts of the held-out jobs."""

    @property
    def seems_better(self) -> bool:
        """Whether the found settings served the goal better on held-out jobs."""
        from gpusched.addons.simulate.tuning import is_better

        return is_better(self.held_out[FOUND], self.held_out[TODAY])

    @property
    def is_better(self) -> bool:
        """Whether the change is worthwhile: better, and not by chance."""
        return self.seems_better and self.verdict.is_significant


def _tune(
    asked: SimulationRequest, goal: Objective, tries: int, hold_out: float, seed: int, file: Path | None, as_json: bool
) -> None:
    from gpusched.addons.simulate import schedules
    from gpusched.addons.simulate.simulation import prepare

    simulation = prepare(asked)
    (present,) = simulation.policies
    report = simulation.run_alike(lambda: _search(simulation, present.settings, goal, tries, hold_out, seed))
    written = file is not None and report.is_better
    if file is not None and written:
        _write(file, report, simulation)
    if as_json:
        _print_document(report, simulation, str(file) if written else None)
    else:
        _print(report)
        if file is not None:
            text = f"wrote {file}; check it with GPUSCHED_CONFIG={file} gpusched config check"
            output.note("gpusched", text if written else f"{file} was not written")
        schedules.print_remarks(simulation.trace)
    if not report.is_better:
        raise typer.Exit(1)


def _search(
    simulation: Simulation, settings: Settings, goal: Objective, tries: int, hold_out: float, seed: int
) -> _Report:
    """Search on the first jobs, and compare on the others."""
    from gpusched.addons.simulate import schedules
    from gpusched.addons.simulate.policies import rules_of
    from gpusched.addons.simulate.tuning import Search, beyond_chance, split

    first, later = split(simulation.trace.jobs, goal, hold_out)
    with schedules.progress("tune") as progress:
        counted = _Counted(simulation, progress)
        search = Search(first, goal, settings, counted, tries, seed)
        counted.of = search.cost() + 3 * len(later) + len(first)
        priority, score = search.find()
        rules = rules_of(PLAIN).settings()
        plain = replace(settings, priority=rules.priority, placement=rules.placement)
        searched = {
            TODAY: goal.score(counted(settings, first)),
            FOUND: score,
        }
        outcomes = {
            TODAY: counted(settings, later),
            PLAIN: counted(plain, later),
            FOUND: counted(replace(settings, priority=priority), later),
        }
        held_out = {name: goal.score(outcome) for name, outcome in outcomes.items()}
        verdict = beyond_chance(goal, outcomes[TODAY], outcomes[FOUND])
    sizes = len(first), len(later)
    return _Report(goal, tries, seed, sizes, priority, settings.priority, searched, held_out, verdict)


class _Counted:
    """Runs schedules and reports the number of jobs replayed so far."""

    def __init__(self, simulation: Simulation, tell: Any) -> None:
        self._simulation = simulation
        self._tell = tell
        self._done = 0
        self.of = 1

    def __call__(self, settings: Settings, jobs: Sequence[TraceJob]) -> Outcome:
        simulation = self._simulation
        part = replace(simulation, trace=dataclasses.replace(simulation.trace, jobs=list(jobs)))
        outcome = part.run(replace(simulation.policies[0], settings=settings), progress=self._tell and self._told)
        self._done += len(jobs)
        if self._tell is not None:
            self._tell(self._done, max(self.of, self._done))
        return outcome

    def _told(self, done: int, of: int) -> None:
        self._tell(self._done + done, max(self.of, self._done + done))


def _print(report: _Report) -> None:
    from gpusched.addons.simulate.tuning import section_of

    titles = ["JOBS", "SETTINGS", *(printable(str(term)) for term in report.goal.terms)]
    lines = [
        [part, name, *_shown(report.goal, score)]
        for part, scores in (("searched", report.searched), ("held out", report.held_out))
        for name, score in scores.items()
    ]
    sys.stdout.write(
        f"{report.tries} settings on the first {report.jobs[0]:,} jobs; held out: the {report.jobs[1]:,} after them\n\n"
    )
    tables.print_table(titles, lines, frozenset(range(2, len(titles))))
    sys.stdout.write(f"\n{printable(_verdict(report))}\n")
    if report.is_better:
        sys.stdout.write(f"\n{section_of(report.priority)}")


def _shown(goal: Objective, score: Score) -> list[str]:
    values = (score.value, *score.limited)
    return [
        f"{term.shown(value)}{' (!)' if term.limit is not None and value > term.limit else ''}"
        for term, value in zip(goal.terms, values, strict=True)
    ]


def _verdict(report: _Report) -> str:
    """The recommendation, in one or two sentences."""
    from gpusched.addons.simulate.tuning import is_better

    goal, scores = report.goal, report.held_out
    found, today, plain = scores[FOUND], scores[TODAY], scores[PLAIN]

    def told(score: Score) -> str:
        values = (score.value, *score.limited)
        was = (today.value, *today.limited)
        return ", ".join(
            f"{term.title} {term.shown(value)} instead of {term.shown(before)}"
            for term, value, before in zip(goal.terms, values, was, strict=True)
        )

    broken = [
        str(term)
        for term, value in zip(goal.limits, found.limited, strict=True)
        if term.limit is not None and value > term.limit
    ]
    if report.priority == report.today:
        text = "Keep the current settings: nothing tried is better, even on the jobs searched."
    elif report.is_better:
        text = f"Better than the current settings on the jobs held out: {told(found)}; {report.verdict}."
    elif report.seems_better:
        text = f"Keep the current settings: the gain of those found may be chance: {told(found)}; {report.verdict}."
    else:
        text = f"Keep the current settings: those found are not better on the jobs held out: {told(found)}."
    if broken:
        text += f" Limits exceeded there: {', '.join(broken)}."
    if is_better(plain, found) and is_better(plain, today):
        text += f" Plain {PLAIN} serves the goal better than both: {told(plain)}."
    return text


def _write(file: Path, report: _Report, simulation: Simulation) -> None:
    from gpusched.addons.simulate.tuning import section_of

    text = (
        f"# found by gpusched tune for: {printable(str(report.goal))}\n"
        f"# {report.tries} settings, seed {report.seed}, on the first {report.jobs[0]} jobs of "
        f"{printable(simulation.trace.name)}\n"
        f"# {printable(_verdict(report))}\n"
        "# In place of the section [priority] of your config file:\n"
        f"{section_of(report.priority)}"
    )
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"{file} cannot be written: {(error.strerror or str(error)).lower()}", "name another"
        ) from None


def _print_document(report: _Report, simulation: Simulation, written: str | None) -> None:
    from gpusched.addons.simulate.tuning import changes_of

    def told(score: Score) -> dict[str, Any]:
        values = (score.value, *score.limited)
        return {
            "value": score.value,
            "limits": [
                {"term": term.title, "limit": term.limit, "value": value, "kept": value <= (term.limit or 0)}
                for term, value in zip(report.goal.limits, values[1:], strict=True)
            ],
        }

    trace = simulation.trace
    output.print_json(
        {
            **trace.document(),
            "goal": str(report.goal),
            "tries": report.tries,
            "seed": report.seed,
            "jobs": {"searched": report.jobs[0], "held_out": report.jobs[1]},
            "changes": changes_of(report.priority, report.today),
            "preset": report.priority.preset,
            "searched": {name: told(score) for name, score in report.searched.items()},
            "held_out": {name: told(score) for name, score in report.held_out.items()},
            "significance": {
                "parts": report.verdict.parts,
                "better": report.verdict.better,
                "worse": report.verdict.worse,
                "p": report.verdict.p,
                "significant": report.verdict.is_significant,
            },
            "advice": "change" if report.is_better else "keep",
            "said": _verdict(report),
            "written": written,
        }
    )
