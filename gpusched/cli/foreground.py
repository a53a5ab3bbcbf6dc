"""The options of grun: those of gsub that make sense for a job that somebody sits at, and its own."""

from __future__ import annotations

from gpusched.cli.parse import Option, Table, text, whole
from gpusched.model.units import parse_duration_s

TYPE_CHECKING = False
if TYPE_CHECKING:
    from gpusched.cli.parse import Values

SHARED = (
    *("--name", "--chdir", "--export", "--env"),
    *("--gpus", "--vram", "--min-vram", "--gpu-ids", "--cpus", "--mem", "--gpus-linked", "--res", "--licenses"),
    *("--time", "--queue", "--account", "--nice", "--dependency", "--begin"),
    *("--nodelist", "--exclude", "--constraint", "--prefer", "--exclusive", "--qos", "--reservation"),
    *("--deadline", "--kill-on-invalid-dep", "--ignore-idle", "--notify", "--notify-to"),
    *("--signal", "--grace", "--output", "--error", "--open-mode"),
    *("--partition", "--gres", "--mem-per-cpu"),
    *("--verbose", "--help", "--version", "--completion"),
)
"""By their long names; they read and mean the same."""

OWN = frozenset({"pty", "keep", "lease_s", "attach", "ntasks", "quiet", "verbose"})
"""What the options set that are not gsub's."""


def lease(value: str) -> Values:
    """A length of time, or a word for none."""
    if value.strip().lower() in ("0", "none", "unlimited"):
        return {"lease_s": 0}
    return {"lease_s": parse_duration_s(value)}


def grun_table() -> Table:
    """grun"""
    from gpusched.cli.gsub_options import gsub_table  # which knows of this table

    front = "Foreground"
    own = [
        Option(
            "--pty",
            sets={"pty": True},
            section=front,
            help="run it at a terminal of its own: a shell, an editor, a debugger; ~. on a new line leaves it",
        ),
        Option(
            "--keep",
            sets={"keep": True},
            section=front,
            help="it goes on when this command is gone, by ~. or a lost connection; default: it is ended",
        ),
        Option("--attach", metavar="ID", read=text("attach"), section=front, help="come back to a job that was kept"),
        Option(
            "--lease",
            metavar="TIME",
            read=lease,
            section=front,
            help="end it when nobody has typed and it has hardly computed for so long, with a warning before: 30m; "
            "none for never; default with GPUs: [interactive] lease_s of the settings, 12 hours unless changed",
        ),
        Option(
            "-n",
            "--ntasks",
            metavar="N",
            read=whole("ntasks", 1, 4096),
            section=front,
            help="inside a job: start it so many times at once; default 1",
        ),
        Option("--quiet", sets={"quiet": True}, section=front, help="do not say what it waits for"),
    ]
    shared = [option for option in gsub_table().options if option.long in SHARED]
    return Table("grun", [*own, *shared])
