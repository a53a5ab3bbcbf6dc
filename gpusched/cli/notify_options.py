"""The options that say whom to tell what."""

from __future__ import annotations

from gpusched.cli.parse import Option, words_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from gpusched.cli.parse import Values

_EVENTS = (
    "begin end fail retry preempt time_limit_80 held pending gpu_idle vram_over gpu_unbooked gpu_intruder queue_empty"
)
"""Those of `model.alerts`, which few submissions import."""
_ALL_OF_SLURM = "begin,end,fail,requeue"


def events(value: str) -> Values:
    """What to be told of, as the daemon reads it too: here a mistake is told with its place."""
    from gpusched.model.alerts import parse_events  # few submissions ask for it

    return {"notify": list(parse_events(value))}


def mail_type(value: str) -> Values:
    """Slurm's words; its ALL is less than ours."""
    words = value.split(",")
    return events(",".join(_ALL_OF_SLURM if word.strip().upper() == "ALL" else word for word in words))


def notify_options(fail: str, slurm: str) -> list[Option]:
    """The options, in the sections that are named so."""
    return [
        Option(
            "--notify",
            metavar="LIST",
            read=events,
            section=fail,
            completes=f"{_EVENTS} all",
            help=f"tell you of {_EVENTS.replace(' ', ', ')}, or all, through the targets of your notify.toml; of an "
            "array's tasks each with array_tasks",
        ),
        Option(
            "--notify-to",
            metavar="NAMES",
            read=words_of("notify_to"),
            section=fail,
            help="only these of your targets, or mail addresses; default: all targets that want the event",
        ),
        Option(
            "--mail-type",
            metavar="LIST",
            read=mail_type,
            section=slurm,
            completes="BEGIN END FAIL REQUEUE TIME_LIMIT_80 ALL NONE",
            help="as --notify; ALL is begin, end, fail, retry and preempt",
        ),
        Option("--mail-user", metavar="ADDRESS", read=words_of("notify_to"), section=slurm, help="as --notify-to"),
    ]
