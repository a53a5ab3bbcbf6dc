"""Submissions of sbatch, srun and salloc: environment, the daemon's answer in Slurm's words, the forecast."""

from __future__ import annotations

import os
import sys

from gpusched.cli.environment import captured
from gpusched.errors import NotReady, Refused, UserError
from gpusched.model.units import is_digits, printable
from gpusched.paths import MAX_REQUEST, read_at_most

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any

    from gpusched.addons.slurm.command import Command, CommandError
    from gpusched.client import DaemonConnection

UNAVAILABLE = "Requested node configuration is not available"
_PREFIXES = {
    "sbatch": "Batch job submission failed",
    "srun": "Unable to allocate resources",
    "salloc": "Job submit/allocate failed",
}
_SAFE = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_@%+=:,./-")


def submit_line(command: Command) -> str:
    """The command line in a form that can be typed."""
    words = [command.name, *sys.argv[1:]]
    quoted = (word if word and _SAFE.issuperset(word) else "'" + word.replace("'", "'\"'\"'") + "'" for word in words)
    return " ".join(quoted)[:4096]


# --- environment ----------------------------------------------------------------------------------------


def environment(command: Command, export: str | None, file: str | None = None) -> tuple[dict[str, str], list[str]]:
    """The environment to send, and the names in it that were asked for by name.

    Args: export: text of --export; file: of --export-file. Raises: CommandError.
    """
    if file is not None:
        found = captured({"export": "NONE", "extra_env": _variables_of(command, file)})
        return found, sorted(found)
    words = _split(export) if export else ["ALL"]
    plain = [word for word in words if "=" not in word]
    given = dict(word.split("=", 1) for word in words if not word.startswith("=") and "=" in word)
    bare = [word for word in plain if word.upper() not in ("ALL", "NONE", "NIL")]
    kind = "ALL" if any(word.upper() == "ALL" for word in plain) else "NONE"
    named = {*given, *(name for name in bare if name in os.environ)}
    found = captured({"export": ",".join([kind, *bare]), "extra_env": given})
    if export:
        found["SLURM_EXPORT_ENV"] = export
    return found, sorted(named)


def _split(text: str) -> list[str]:
    """Words between commas; a value may hold commas within quotes."""
    words, quote = [""], ""
    for char in text:
        if quote:
            if char == quote:
                quote = ""
            else:
                words[-1] += char
        elif char in "'\"":
            quote = char
        elif char == ",":
            words.append("")
        else:
            words[-1] += char
    return [word for word in words if word]


def _variables_of(command: Command, file: str) -> dict[str, str]:
    try:
        with open(int(file) if is_digits(file) else file, "rb") as source:
            content = read_at_most(source, MAX_REQUEST, printable(file), "").decode("utf-8", "surrogateescape")
    except (OSError, ValueError):
        raise command.error(f"Unable to open file {printable(file)}") from None
    except Refused as error:
        raise command.error(error.message) from None
    pairs = (pair.partition("=") for pair in content.split("\0"))
    return {name.strip(): value for name, equals, value in pairs if equals and name.strip()}


# --- the daemon's answer --------------------------------------------------------------------------------


def hand_in(
    command: Command, client: DaemonConnection, request: dict[str, Any], *, never_now: str = ""
) -> dict[str, Any]:
    """Submit, and return the daemon's answer.

    Args: never_now: what to say instead of `UNAVAILABLE`. Raises: CommandError in Slurm's words, NotReady.
    """
    try:
        return client.call("POST", "/v1/jobs", request)
    except UserError as error:
        raise refused(command, error, request["spec"], never_now or UNAVAILABLE) from None
    except ConnectionError:
        client.close()
        raise NotReady(
            "the scheduler went away before it answered and may have accepted the job", "check with: squeue --me"
        ) from None


SENTENCES = {
    "queue": "Invalid partition name specified",
    "queue_access": "User's group not permitted to use this partition",
    "qos": "Invalid qos specification",
    "qos_access": "Invalid qos specification",
    "account": "Invalid account or account/partition combination specified",
    "license": "Invalid license specification",
    "node": "Invalid node name specified",
    "constraint": "Invalid feature specification",
    "reservation": "Requested reservation is invalid",
    "reservation_access": "Access denied to requested reservation",
    "nice": "Invalid --nice value",
    "dependency": "Job dependency problem",
    "array": "Invalid job array specification",
    "deadline": "Requested time limit is invalid (missing or exceeds some limit)",
    **dict.fromkeys(("cpus", "memory", "gpus", "nodes", "size", "time", "policy"), UNAVAILABLE),
}
"""What a refusal is about, see `errors.ABOUT`, and Slurm's sentence on it."""
_SPELLINGS = (
    (r"(?<!\S)-g (?=\S)", "-G "),
    (r"(?<!\S)-m (?=\S)", "--mem "),
    (r"(?<!\S)-q (?=\S)", "-p "),
    (r"\bgsub --res (\w+)=", r"sbatch --gres \1:"),
    (r"--res (?=\S)", "--gres "),
)
"""Options of gsub in a sentence of ours, and how sbatch spells them."""
_TOO_MANY = "Job violates accounting/QOS policy (job submit limit, user's size and/or time limits)"


def refused(command: Command, error: UserError, spec: dict[str, Any], unavailable: str = UNAVAILABLE) -> CommandError:
    """A refusal in Slurm's words, followed by our sentence and hint."""
    before, sentence = _in_slurms_words(error.about, spec)
    sentence = unavailable if sentence == UNAVAILABLE else sentence
    prefix = _PREFIXES[command.name]
    lines = [*before, f"{prefix}: {sentence or printable(error.message, 2000)}"]
    if sentence == "":
        lines = [*before]
    found = command.error("\n".join(lines))
    own = [] if sentence is None else [printable(error.message, 2000)]
    own += [f"hint: {error.hint}"] if error.hint else []
    found.text = "\n".join([found.text, *(f"{command.name}: {in_slurms_letters(command, line)}" for line in own)])
    return found


def in_slurms_letters(command: Command, text: str) -> str:
    """A sentence of ours with options as sbatch spells them, -q is a QOS there, and the help of the typed command."""
    import re  # refusals alone need it

    for pattern, own in _SPELLINGS:
        text = re.sub(pattern, own, text)
    return command.naming_its_help(text)


def _in_slurms_words(about: str | None, spec: dict[str, Any]) -> tuple[list[str], str | None]:
    """Slurm's lines before the last one, and its last sentence: None to say it in our words, empty for none."""
    if about == "resource":
        return ["Invalid generic resource (gres) specification"], ""
    if about == "job_count":
        return ["QOSMaxSubmitJobPerUserLimit"], _TOO_MANY
    before = []
    if about == "queue":
        before = [f"invalid partition specified: {printable(spec.get('queue', '(null)'))}"]
    elif about == "memory":
        before = ["Memory specification can not be satisfied"]
    return before, SENTENCES.get(about or "")


def say_notes(command: Command, answer: dict[str, Any], spec: dict[str, Any]) -> None:
    """Print the daemon's notes on a submission."""
    for text in (*answer.get("notes", ()), *answer.get("limits", ())):
        command.note(printable(text))
    if spec.get("notify"):
        from gpusched.cli.notify_targets import warn_about_targets  # few jobs ask for mail

        warn_about_targets(command.name, spec.get("notify_to", ()))


def print_forecast(command: Command, client: DaemonConnection, spec: dict[str, Any]) -> int:
    """Print where and when a job would start, as --test-only does."""
    from gpusched.addons.slurm.values import instant  # not needed by a submission

    try:
        answer = client.call("POST", "/v1/jobs", {"spec": spec, "dry_run": True})
    except UserError as error:
        raise refused(command, error, spec) from None
    found = answer["dry_run"]
    if found["verdict"] == "refused":
        _, sentence = _in_slurms_words(found["about"], spec)
        problem = command.error(f"allocation failure: {sentence or UNAVAILABLE}")
        own = [printable(found["text"]), *([f"hint: {found['hint']}"] if found["hint"] else [])]
        lines = (f"{command.name}: {in_slurms_letters(command, line)}" for line in own)
        problem.text = "\n".join([problem.text, *lines])
        raise problem
    at = instant(found["start_at"], "unknown")
    where = f"on nodes {found['node'] or '(null)'} in partition {found['queue']}"
    command.note(f"Job {found['job_id']} to start at {at} using {found['cpus']:g} processors {where}")
    return 0


def say_options(command: Command, options: Iterable[tuple[str, str | None]]) -> None:
    """Print the options as -v does."""
    shown: dict[str, str] = {}
    for name, text in options:
        known = shown.get(name, "0")
        if name == "verbose":
            text = str(int(known) + 1)
        shown[name] = "set" if text is None else printable(text)
    dashes = "-" * 20
    lines = [f"{name:<20}: {shown[name]}" for name in sorted(shown)]
    for line in ("defined options", f"{dashes} {dashes}", *lines, f"{dashes} {dashes}", "end of defined options"):
        command.note(line)
