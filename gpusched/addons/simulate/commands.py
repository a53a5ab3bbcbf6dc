"""`gpusched simulate`, `gpusched pack` and `gpusched replay`: their options."""

from __future__ import annotations

from typing import Annotated

import typer

from gpusched.addons.simulate import tune as options
from gpusched.cli.admin.daemon import Json
from gpusched.errors import UsageError

_PACK = "gpusched pack nodes.csv pods.csv --policy first,pack"


def simulate(
    context: typer.Context,
    trace: options.Trace = None,
    nodes: options.Nodes = None,
    cluster: options.Cluster = None,
    policy: Annotated[
        str | None,
        typer.Option(
            "--policy",
            metavar="NAMES",
            help="Order (fcfs, sjf, saf, spf, sjf_exact), +backfill (none, greedy, easy, sjbf, cons), /placement "
            "(best, first, spread), :prediction (last2, similar, mixed, mean, exact); fair, throughput, fifo, slurm: "
            "the presets; default, present: with the settings of --config, of this machine; several with commas.",
        ),
    ] = None,
    predict: options.Predict = None,
    exact: options.Exact = False,
    rules: options.Rules = None,
    rows: options.Rows = None,
    config: Annotated[
        str | None, typer.Option("--config", metavar="FILE", help="A config file, used as the policy 'default'.")
    ] = None,
    from_history: options.FromHistory = False,
    since: options.Since = None,
    tick: options.Tick = False,
    fail_rate: options.FailRate = 0.0,
    retries: options.Retries = 0,
    seed: Annotated[
        int, typer.Option("--seed", metavar="N", help="Seed for which runs fail; the same N gives the same failures.")
    ] = 0,
    details: Annotated[bool, typer.Option("--details", help="All measures, one per line.")] = False,
    gains: Annotated[
        bool,
        typer.Option("--gains", help="Compare each user (or queue) under the first policy with each of the others."),
    ] = False,
    by: Annotated[
        str | None,
        typer.Option(
            "--by", metavar="WHAT", help="user or queue: one table each, also the groups of --gains and --plot."
        ),
    ] = None,
    wait_bound: Annotated[
        str | None, typer.Option("--wait-bound", metavar="TIME", help="Count jobs that wait longer than this: 30m, 4h.")
    ] = None,
    plot: Annotated[
        str | None,
        typer.Option("--plot", metavar="DIR", help="Write plots to this folder: Gantt, utilisation, waits, slowdowns."),
    ] = None,
    as_csv: Annotated[
        bool, typer.Option("--csv", help="Print CSV: one row per policy, or per user with --gains.")
    ] = False,
    packed: Annotated[
        tuple[str, str] | None,
        typer.Option("--pack", metavar="NODES PODS", help="Instead of a trace: as gpusched pack NODES PODS."),
    ] = None,
    orders: Annotated[
        int | None, typer.Option("--orders", metavar="N", help="With --pack: as in gpusched pack.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Replay a trace on a virtual clock with the daemon's scheduler and print metrics of the schedule.

    example: gpusched simulate kth_sp2.swf.gz --policy fcfs+easy,sjf+easy
    """
    if packed is not None or orders is not None:
        if packed is None:
            raise UsageError("--orders needs --pack", _PACK)
        if others := _given_beside_pack(context):
            raise UsageError(f"--pack has no clock and cannot be combined with {others[0]}", _PACK)
        pack(*packed, policy, orders, as_json)
        return
    from gpusched.addons.simulate.daemon_run import Mishaps
    from gpusched.addons.simulate.simulation import SimulationRequest, show_simulation  # not needed by other commands

    asked = SimulationRequest(
        trace=trace,
        nodes=nodes,
        cluster=cluster,
        policies=() if policy is None else tuple(policy.split(",")),
        is_exact=exact,
        rules=rules,
        predict=predict,
        from_history=from_history,
        since=since,
        config=config,
        tick=tick,
        rows=rows or (),
        mishaps=Mishaps(fail_rate, seed, retries),
    )
    show_simulation(
        asked,
        wait_bound=wait_bound,
        details=details,
        with_gains=gains,
        by=by,
        plot=plot,
        as_csv=as_csv,
        as_json=as_json,
    )


def _given_beside_pack(context: typer.Context) -> list[str]:
    """What was typed with --pack, and does not apply to it."""
    applies = ("packed", "orders", "policy", "as_json")
    found = []
    for parameter in context.command.params:
        source = context.get_parameter_source(parameter.name or "")
        if parameter.name not in applies and source is not None and source.name == "COMMANDLINE":
            found.append("a trace" if parameter.param_type_name == "argument" else parameter.opts[0])
    return found


def pack(
    nodes: Annotated[str, typer.Argument(metavar="NODES", help="A table of nodes, in the columns of openb.")],
    pods: Annotated[str, typer.Argument(metavar="PODS", help="A table of tasks, in the columns of openb.")],
    policy: Annotated[
        str | None,
        typer.Option(
            "--policy", metavar="NAMES", help="Strategies of [placement], or random; several with commas; default: all."
        ),
    ] = None,
    orders: Annotated[
        int | None, typer.Option("--orders", metavar="N", help="Number of random arrival orders; default: 1.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Fill nodes with tasks that never end, and print the fraction of the GPUs that each strategy can allocate.

    example: gpusched pack nodes.csv pods.csv --policy first,pack
    """
    from gpusched.addons.simulate.simulation import show_packing  # not needed by other commands

    show_packing(nodes, pods, policy, orders, as_json)


def replay(
    file: Annotated[
        str, typer.Argument(metavar="FILE", help="A file written by gpusched debug snapshot; - for standard input.")
    ],
    job: Annotated[
        str | None, typer.Option("--job", metavar="ID", help="Only this job: decision, reason, and what would help.")
    ] = None,
    policy: Annotated[
        str | None,
        typer.Option(
            "--policy",
            metavar="NAMES",
            help="Compare with these policies, named as in gpusched simulate, on top of the recorded settings; presets "
            "too; default, present: the settings of --config, of this machine; several with commas.",
        ),
    ] = None,
    config: Annotated[
        str | None,
        typer.Option("--config", metavar="FILE", help="Compare with the settings of this file (policy 'default')."),
    ] = None,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Only the ids of jobs that start, or the reason of the one job.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Repeat a scheduling decision from a recorded snapshot and explain the plan; nothing is executed.

    Settings about reading the machine ([gpu], [node]) have no effect, as the snapshot was taken with them. Plug-ins
    are not loaded.

    example: gpusched replay now.json --job 42 --policy fcfs+easy
    """
    from gpusched.addons.simulate.replay_report import show  # not needed by other commands

    policies = [] if policy is None else policy.split(",")
    show(file, job=job, policies=policies, config=config, as_json=as_json, is_quiet=quiet)
