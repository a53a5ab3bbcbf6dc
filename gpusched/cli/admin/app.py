"""gpusched: the daemon, the doctor, the configuration, a demonstration."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from gpusched import __version__, entry_points, paths
from gpusched.cli import output, tables
from gpusched.cli.admin.daemon import Json, daemon_app
from gpusched.cli.parse import read
from gpusched.client import connect
from gpusched.errors import NotReady, UsageError, UserError
from gpusched.model.spec import FIELDS
from gpusched.model.units import format_duration, gpu_list, is_digits, printable

_SHOWN_IDS = 5


app = typer.Typer(
    name="gpusched",
    help="Administer the scheduler: daemon, health, settings, backups, installation.\n\nexample: gpusched doctor",
    no_args_is_help=True,
    add_completion=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
config_app = typer.Typer(help="Show and check the settings.", no_args_is_help=True, rich_markup_mode=None)


def _attach(name: str, addon: str) -> None:
    """Add the command of an add-on; where that is absent, one that says so."""
    found = entry_points.find(f"command.{name}")
    if isinstance(found, typer.Typer):
        app.add_typer(found, name=name)
    elif found is not None:
        app.command(name)(found)
    else:
        takes_anything = {"ignore_unknown_options": True, "allow_extra_args": True}

        @app.command(name, hidden=True, add_help_option=False, context_settings=takes_anything)
        def say_absent() -> None:
            raise entry_points.absent(addon, f"gpusched {name}")


app.add_typer(daemon_app, name="daemon")
app.add_typer(config_app, name="config")
_attach("notify", "notify")
_attach("system", "system")
_attach("cluster", "ray")
_attach("slurm-commands", "slurm")
_attach("debug", "simulate")
_attach("web", "web")
_attach("mcp", "mcp")


def main() -> int:

    def body(words: list[str]) -> int:
        # click handles its own usage errors (exit 2, one sentence); ours are left to output.run.
        code = app(words, standalone_mode=False)
        return code if isinstance(code, int) else 0

    return output.run("gpusched", _with_click_errors(body))


def _with_click_errors(body: Callable[[list[str]], int]) -> Callable[[list[str]], int]:
    def run(words: list[str]) -> int:
        try:
            return body(words)
        except Exception as error:
            # typer bundles its own copy of click, so its exceptions are recognised by their methods.
            message = getattr(error, "format_message", None)
            if message is None:
                raise
            text = message().strip().rstrip(".")
            if type(error).__name__ == "NoArgsIsHelpError":
                sys.stderr.write(f"{text}\n")
            elif text:
                sys.stderr.write(f"gpusched: error: {text}\ngpusched: hint: see: {_command_of(error)} --help\n")
            return int(getattr(error, "exit_code", 2))

    return run


def _command_of(error: Exception) -> str:
    """The command as typed, as far as it was parsed."""
    words = getattr(getattr(error, "ctx", None), "command_path", "").split()[1:]
    return " ".join(["gpusched", *words])


def _show_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"gpusched {__version__}")
        raise typer.Exit


@app.callback()
def common(
    _version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Options of the command itself."""


@app.command()
def version() -> None:
    """Print the version."""
    typer.echo(__version__)


@app.command()
def snapshots(
    prune: Annotated[bool, typer.Option("--prune", help="Delete those that no unfinished job needs.")] = False,
    as_json: Json = False,
) -> None:
    """List your code snapshots (`gsub --snapshot`): size, time since last use, jobs that need them."""
    from gpusched.snapshots.retention import stored_snapshots  # not needed by other commands
    from gpusched.snapshots.snapshot import folder_of, show_size, sweep

    with connect() as client:
        home = folder_of(client.socket_path)

        def users() -> dict[str, list[str]]:
            found: dict[str, list[str]] = {}
            for job_id, name in client.call("GET", "/v1/jobs?fields=id,snapshot")["rows"]:
                if name:
                    found.setdefault(name, []).append(job_id)
            return found

        dropped = sweep(home, lambda: set(users())) if prune else []
        needed, here = users(), stored_snapshots(home)
    now = time.time()
    if as_json:
        rows = [
            {
                "name": one.name,
                "root": one.root,
                "files": one.files,
                "bytes": one.size,
                "used_at": one.used_at,
                "jobs": needed.get(one.name, []),
            }
            for one in here
        ]
        output.print_json({"folder": home, "snapshots": rows, "dropped": dropped})
        return
    if dropped:
        sys.stdout.write(f"deleted {len(dropped)} that no unfinished job needs\n")
    lines = []
    for one in here:
        ids = needed.get(one.name, [])
        jobs = ",".join(ids[:_SHOWN_IDS]) + (",..." if len(ids) > _SHOWN_IDS else "")
        unused = format_duration(max(0.0, now - one.used_at))
        lines.append([one.name, show_size(one.size), str(one.files), unused, jobs or "-", printable(one.root)])
    if lines:
        tables.print_table(["NAME", "SIZE", "FILES", "UNUSED", "JOBS", "CODE"], lines, frozenset({1, 2, 3}))
    total = show_size(sum(one.size for one in here))
    sys.stdout.write(f"{len(here)} snapshots, {total}, in {printable(os.path.realpath(home))}\n")


_attach("simulate", "simulate")
_attach("pack", "simulate")
_attach("tune", "simulate")
_attach("replay", "simulate")


@app.command()
def agent(
    node: Annotated[str, typer.Argument(metavar="NODE", help="Name of this machine in the cluster.")],
    address: Annotated[
        str | None, typer.Option("--address", metavar="IP", help="Where other nodes reach it; default: its name.")
    ] = None,
    is_system: Annotated[
        bool, typer.Option("--system", help="Run jobs of all users, as root, for a system's daemon.")
    ] = False,
    root: Annotated[
        str | None, typer.Option("--root", metavar="DIR", help="With --system: keep all files below DIR, for testing.")
    ] = None,
) -> None:
    """Run jobs on this machine for a daemon on another one, which starts this command; see [cluster].

    example: ssh lab2 gpusched agent lab2
    """
    if root is not None and not is_system:
        raise UsageError(f"--root {root} is for jobs of all users", "add --system")
    if is_system:
        if os.geteuid() != 0:
            raise NotReady("jobs of all users are started by root alone", f"sudo gpusched agent --system {node}")
        paths.serve_system(root or "")
    from gpusched.daemon.agent import serve  # a daemon's code, which no other command needs

    raise typer.Exit(serve(node, address))


_attach("metrics", "metrics")


@app.command("backup")
def backup_command(
    file: Annotated[
        str, typer.Argument(help="Destination; an existing backup of this name is replaced.", metavar="FILE")
    ],
    as_json: Json = False,
) -> None:
    """Copy the job table to FILE, verified and private to its owner; the daemon may be running.

    example: gpusched backup ~/backups/gpusched.db
    """
    from gpusched.cli.admin.backups import make  # SQLite, not needed by other commands

    make(file, as_json)


@app.command("restore")
def restore_command(
    file: Annotated[
        str | None, typer.Argument(help="A file written by gpusched backup.", metavar="FILE", show_default=False)
    ] = None,
    no_hold: Annotated[
        bool, typer.Option("--no-hold", help="Let its unfinished jobs start, although they may have run since.")
    ] = False,
    empty: Annotated[
        bool, typer.Option("--empty", help="Begin with an empty job table instead of a backup; ids continue.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Replace the job table with a backup; stop the daemon first. The old table is kept beside it.

    Unfinished jobs of the backup are held, since they may have run in the meantime. Jobs submitted after the backup are
    unknown, and the daemon ends those still running. Job ids are never reused.

    example: gpusched daemon stop && gpusched restore ~/backups/gpusched.db
    """
    from gpusched.cli.admin.backups import put_back  # likewise

    if empty == (file is not None):
        said = f"{printable(file)} and --empty exclude each other" if file is not None else "no backup is named"
        raise UsageError(
            said, "name a file: gpusched restore FILE; or begin with an empty table: gpusched restore --empty"
        )
    put_back(file, not no_hold, as_json)


_OPTIONS = {option.long: option for field in FIELDS.values() for option in field.options}


@app.command()
def adopt(
    pid: Annotated[str, typer.Argument(metavar="PID", help="A process that uses a GPU, or one of its ancestors.")],
    time_limit: Annotated[
        str | None,
        typer.Option("-t", "--time", metavar="TIME", help="Time limit, counted from now; default: the queue's."),
    ] = None,
    queue: Annotated[str | None, typer.Option("-q", "--queue", metavar="NAME", help="Queue to charge.")] = None,
    account: Annotated[str | None, typer.Option("-A", "--account", metavar="NAME", help="Account to charge.")] = None,
    qos: Annotated[str | None, typer.Option("--qos", metavar="NAME", help="Quality of service.")] = None,
    name: Annotated[
        str | None, typer.Option("-J", "--name", metavar="NAME", help="Job name; default: the program's.")
    ] = None,
    vram: Annotated[
        str | None,
        typer.Option("--vram", metavar="SIZE", help="GPU memory to book on each of its GPUs; default: whole GPUs."),
    ] = None,
    grace: Annotated[
        str | None, typer.Option("--grace", metavar="TIME", help="Time between TERM and KILL when it is cancelled.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Turn a running process that uses a GPU without a job into a job: your own, or as an admin anyone's.

    The process keeps running, and the GPUs it uses are booked for it. It has no memory or CPU limits, its exit code is
    unknown, and it cannot be requeued.

    example: gpusched adopt 4711 -t 4h
    """
    wishes = {
        "time": time_limit,
        "queue": queue,
        "account": account,
        "qos": qos,
        "name": name,
        "vram": vram,
        "grace": grace,
    }
    if not is_digits(pid):
        raise UsageError(f"{printable(pid, 40)!r} is not a process id", "list processes on GPUs with: ginfo --foreign")
    body: dict[str, Any] = {"pid": int(pid)}
    for key, value in wishes.items():
        if value is None:
            continue
        try:
            body.update(read(_OPTIONS[f"--{key}"], value))
        except ValueError as error:
            raise UsageError(f"--{key}: {error}", "see: gpusched adopt --help") from None
    with connect() as client:
        adopted = client.call("POST", "/v1/adopt", body)["adopted"]
    if as_json:
        output.print_json({"adopted": adopted})
        return
    gpus = gpu_list(adopted["gpus"])
    typer.echo(f"Adopted process {int(pid)} as job {adopted['id']} (GPU {gpus})")


_LEVELS = {"ok": "ok  ", "warn": "warn", "fail": "FAIL"}


@app.command()
def doctor(as_json: Json = False) -> None:
    """Check everything that can go wrong and say how to fix it. Exit code 1 when a check fails."""
    from gpusched.cli.admin.doctor import examine

    checks = examine()
    if as_json:
        output.print_json({"checks": [check.document() for check in checks]})
    else:
        for check in checks:
            typer.echo(f"{_LEVELS[check.level]} {check.check}: {printable(check.text)}")
            if check.level != "ok" and check.hint:
                typer.echo(f"     -> {printable(check.hint)}")
    if not all(check.ok for check in checks):
        raise typer.Exit(1)


_LEAST_VALUE = 12


@config_app.command("show")
def config_show(
    as_json: Json = False,
    changed: Annotated[bool, typer.Option("--changed", help="Only settings that are not as by default.")] = False,
) -> None:
    """Print every setting with its value and origin."""
    from gpusched.config import load_settings
    from gpusched.daemon.preset import chosen_preset

    loaded = load_settings(paths.config_file(), os.environ, chosen=chosen_preset(paths.preset_file()))
    known = [one for one in loaded.values() if not changed or one[2] != "default"]
    if as_json:
        found = {path: {"value": value, "origin": origin} for path, value, origin in known}
        output.print_json({"settings": found})
        return
    file, is_shown = Path(paths.config_file()), sys.stdout.isatty()
    if is_shown:
        # The number of the line is what is looked for, and at the end.
        known = [(path, value, origin.replace(str(file), file.name)) for path, value, origin in known]
    rows = [
        (path, "unset" if value is None else json.dumps(value, default=dict), printable(origin))
        for path, value, origin in known
    ]
    # One long value would push the origins of all settings out of sight.
    tables.print_table(("SETTING", "VALUE", "FROM"), rows, cut={1: _LEAST_VALUE, 2: _LEAST_VALUE})
    if is_shown and any(file.name in origin for _, _, origin in known):
        typer.echo(tables.folded(f"{file.name}: {printable(str(file))}"))


@config_app.command("check")
def config_check(as_json: Json = False) -> None:
    """Check the config file and your notify.toml and report every problem with file and line.

    Exit code 2 when a file is invalid, 1 when its guarantees exceed the machine. Warnings, such as an account without
    members or a setting without effect, leave it at 0.
    """
    from gpusched.cli.admin.doctor import (
        broken_promises,
        effect_warnings,
        membership_warnings,
        tariff_warnings,
        untrusted_programs,
    )
    from gpusched.cli.notify_targets import problems_in_targets
    from gpusched.config import load_settings, problems_in

    where = os.environ.get("GPUSCHED_CONFIG") or paths.config_file()
    problems: list[UserError] = [*problems_in(paths.config_file(), os.environ)]
    warnings: list[UserError] = []
    if not problems:
        loaded = load_settings(paths.config_file(), os.environ)
        problems += broken_promises(loaded)
        problems += untrusted_programs(loaded)
        warnings += membership_warnings(loaded)
        warnings += tariff_warnings(loaded)
        warnings += effect_warnings(loaded)
    problems += problems_in_targets()
    if as_json:
        found = [{"message": problem.message, "hint": problem.hint} for problem in problems]
        noted = [{"message": warning.message, "hint": warning.hint} for warning in warnings]
        output.print_json({"file": where, "exists": os.path.exists(where), "problems": found, "warnings": noted})
    else:
        for at, problem in enumerate(problems):
            # Consecutive problems share one hint.
            is_last = at + 1 == len(problems) or problems[at + 1].hint != problem.hint
            output.fail("gpusched", problem if is_last else type(problem)(problem.message))
        for warning in warnings:
            output.note("gpusched", f"warning: {warning.message}; {warning.hint}")
    if problems:
        raise typer.Exit(problems[0].exit_code)
    if not as_json:
        typer.echo(f"{where} is fine" if os.path.exists(where) else f"there is no {where}; the defaults apply")


@app.command()
def demo() -> None:
    """Run a first GPU job in a temporary scheduler.

    Uses real GPUs if there are any, otherwise simulated ones.
    """
    from gpusched.cli.admin.demo import run_demo

    raise typer.Exit(run_demo())


def admin_help() -> dict[str, str]:
    """Title -> help text of `gpusched` and each of its commands, and of `gpuschedd`, for the reference page."""
    import contextlib
    import io

    from gpusched.daemon.arguments import build_parser

    texts: dict[str, str] = {}
    for words in (
        [],
        ["daemon", "start"],
        ["daemon", "stop"],
        ["daemon", "status"],
        ["doctor"],
        ["adopt"],
        ["snapshots"],
        ["simulate"],
        ["metrics"],
        ["web"],
        ["web", "open"],
        ["backup"],
        ["restore"],
        ["config", "show"],
        ["config", "check"],
        ["notify", "test"],
        ["debug", "snapshot"],
        ["system", "install"],
        ["system", "uninstall"],
        ["cluster", "init"],
        ["cluster", "join"],
        ["cluster", "leave"],
        ["cluster", "status"],
        ["cluster", "doctor"],
        ["cluster", "token"],
        ["cluster", "run"],
        ["system", "guard", "on"],
        ["system", "guard", "off"],
        ["system", "guard", "status"],
        ["replay"],
        ["tune"],
        ["demo"],
        ["version"],
    ):
        captured = io.StringIO()
        with contextlib.redirect_stdout(captured), contextlib.suppress(SystemExit):
            app([*words, "--help"], standalone_mode=False, prog_name="gpusched", terminal_width=100)
        texts[" ".join(["gpusched", *words])] = captured.getvalue()
    texts["gpuschedd"] = build_parser().format_help()
    return texts
