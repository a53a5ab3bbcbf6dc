"""gpusched slurm-commands: puts `sbatch`, `squeue` and Slurm's other commands into a folder of PATH."""

from __future__ import annotations

import os
import shlex
import sys
from typing import Annotated

import typer

from gpusched import slurm_commands
from gpusched.cli import output
from gpusched.cli.admin.daemon import Json
from gpusched.errors import NotReady, Refused, UsageError
from gpusched.model.units import plural, printable

app = typer.Typer(
    help="Install and remove sbatch, squeue and Slurm's other commands. Jobs always have them.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

Folder = Annotated[str, typer.Argument(metavar="DIR", help="A folder in your PATH; for all users /usr/local/bin.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but problems.")]


@app.command()
def install(folder: Folder, quiet: Quiet = False, as_json: Json = False) -> None:
    """Write the commands into DIR, which is made if need be. Can be repeated, for example after an upgrade.

    Refused where DIR has commands of a real Slurm; warns when PATH has some elsewhere.

    example: gpusched slurm-commands install ~/.local/bin
    """
    folder = _folder(folder)
    search = os.environ.get("PATH", "")
    try:
        if not os.path.isdir(folder):
            os.mkdir(folder)
        foreign = slurm_commands.foreign_commands(folder)
        if foreign:
            raise Refused(
                f"{printable(os.path.join(folder, foreign[0]))} is not gpusched's; it may belong to a real Slurm",
                "choose one of your folders: gpusched slurm-commands install ~/.local/bin",
            )
        done = slurm_commands.write_commands(folder)
    except OSError as error:
        raise _failed(folder, error) from None
    is_on_path = slurm_commands.is_on(folder, search)
    other = slurm_commands.other_slurm(folder, search)
    if other is not None:
        text = f"{printable(other)} belongs to another Slurm: the first in PATH is the one that runs"
        output.note("gpusched", f"warning: {text}")
    if os.geteuid() == 0:
        doubt = slurm_commands.unreachable_part([sys.executable, *slurm_commands.import_folders()])
        if doubt is not None:
            output.note("gpusched", f"warning: only you can use the commands: {printable(doubt)}")
    if as_json:
        output.print_json(
            {
                "folder": folder,
                "written": list(done.changed),
                "unchanged": list(done.kept),
                "on_path": is_on_path,
                "other_slurm": other,
            }
        )
    elif not quiet:
        _say_installed(folder, done, is_on_path)


def _say_installed(folder: str, done: slurm_commands.WrittenCommands, is_on_path: bool) -> None:
    names = done.changed or done.kept
    verb = "wrote" if done.changed else "already there:"
    sys.stdout.write(f"{verb} {plural(len(names), 'command')} in {printable(folder)}: {' '.join(names)}\n")
    if not is_on_path:
        line = f'export PATH="$PATH:"{shlex.quote(folder)}'
        sys.stdout.write(f"add the folder to your PATH, for example in ~/.bashrc: {printable(line)}\n")


@app.command()
def uninstall(folder: Folder, quiet: Quiet = False, as_json: Json = False) -> None:
    """Remove the commands that install wrote from DIR, and nothing else.

    example: gpusched slurm-commands uninstall ~/.local/bin
    """
    folder = _folder(folder)
    if not os.path.isdir(folder):
        raise UsageError(f"there is no folder {printable(folder)}", "name the one that install was given")
    try:
        done = slurm_commands.remove_commands(folder)
    except OSError as error:
        raise _failed(folder, error) from None
    if as_json:
        output.print_json({"folder": folder, "removed": list(done.changed), "not_ours": list(done.kept)})
        return
    if quiet:
        return
    names = f": {' '.join(done.changed)}" if done.changed else ""
    sys.stdout.write(f"removed {plural(len(done.changed), 'command')} from {printable(folder)}{names}\n")
    if done.kept:
        sys.stdout.write(f"left in place, not written by gpusched: {' '.join(done.kept)}\n")


def _folder(text: str) -> str:
    """The folder as an absolute path. Raises: UsageError for what is none."""
    folder = os.path.abspath(os.path.expanduser(text))
    hint = "for example: gpusched slurm-commands install ~/.local/bin"
    if not text or ":" in folder:
        raise UsageError(f"{printable(text)!r} cannot be a folder of PATH", hint)
    if os.path.lexists(folder) and not os.path.isdir(folder):
        raise UsageError(f"{printable(folder)} is not a folder", hint)
    return folder


def _failed(folder: str, error: OSError) -> NotReady:
    where = printable(str(error.filename or folder))
    if isinstance(error, FileNotFoundError):
        return NotReady(f"there is no folder {printable(os.path.dirname(folder))}", f"mkdir -p {shlex.quote(folder)}")
    hint = "choose one of your folders, such as ~/.local/bin; to install for all users, use sudo"
    return NotReady(f"cannot write {where}: {error.strerror}", hint)
