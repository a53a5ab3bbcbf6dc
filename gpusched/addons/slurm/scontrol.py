"""scontrol: show jobs, nodes and partitions; hold, release, requeue, suspend and update jobs; drain nodes."""

from __future__ import annotations

import os
import sys

from gpusched.addons.slurm.command import VERSION, Command, CommandError, cluster_suffix, parse, run
from gpusched.addons.slurm.values import DENIED, INVALID_ID, is_job_id, job_words
from gpusched.cli.query import quote
from gpusched.errors import Forbidden, GpuschedError, NotFound, NotReady, Refused, UsageError, UserError
from gpusched.model.units import printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from gpusched.addons.slurm.command import Parsed
    from gpusched.client import DaemonConnection

COMMAND = Command(
    "scontrol",
    "scontrol [options] [keyword [arguments]]",
    """
-a --all  accepted: no partition is hidden
-d --details  with show: more detail
-D --decode  accepted: there is nothing to decode
--federation  accepted: there is one cluster
-F --future  accepted: there are no future nodes
-h --help  show this help
--hide  accepted: nothing is hidden
--json  with show job and show node: print JSON
--local  accepted: there is one cluster
-M --clusters --cluster NAMES  this cluster's name, or all
-o --oneliner  one line per entry
-Q --quiet  print no errors
--sibling  accepted: there is one cluster
-u --uid NAME  refused: permissions are those of the user who runs the command
-v --verbose  explain errors in full
--yaml  with show job: print YAML
""",
    permutes=True,
)
NOT_SUPPORTED = {
    "abort": "systemctl kill gpusched",
    "cancel_reboot": "gctl undrain",
    "completing": "squeue -t CG",
    "create_reservation": "scontrol create reservation ...",
    "fwd": "",
    "notify": "",
    "pidinfo": "squeue --me",
    "reboot": "",
    "reboot_nodes": "",
    "schedloglevel": "[daemon] log_level in the config file",
    "setdebug": "[daemon] log_level in the config file",
    "setdebugflags": "[daemon] log_level in the config file",
    "shutdown": "gpusched daemon stop",
    "takeover": "",
    "token": "",
}


class ControlLine:
    """One line of scontrol: its options, and a connection that opens when it is needed."""

    def __init__(self, options: Parsed) -> None:
        self.is_one_line = options.has("oneliner")
        self.is_detailed = options.has("details")
        self.is_json = options.has("json")
        self.is_yaml = options.has("yaml")
        self.is_quiet = options.has("quiet")
        self.is_verbose = options.has("verbose")
        self._client: DaemonConnection | None = None

    @property
    def client(self) -> DaemonConnection:
        if self._client is None:
            from gpusched.client import connect  # hostnames need no daemon

            self._client = connect()
        return self._client

    def with_options(self, options: Parsed) -> ControlLine:
        """Another line on the same connection, with options of its own."""
        found = ControlLine(options) if options.options else self
        found._client = self._client
        return found

    def complain(self, text: str) -> None:
        """Print an error, unless --quiet."""
        if not self.is_quiet:
            sys.stderr.write(f"{printable(text)}\n")

    def explain(self, error: GpuschedError) -> None:
        """Print our own words for an error, with --verbose."""
        if self.is_verbose:
            self.complain(f"scontrol: {error.message}")
            if error.hint:
                self.complain(f"scontrol: hint: {COMMAND.naming_its_help(error.hint)}")


def main() -> int:
    return run(COMMAND, body)


def body(options: Parsed) -> int:
    if options.has("uid"):
        raise COMMAND.error("--uid is not supported: permissions are those of the user who runs the command")
    line = ControlLine(options)
    if options.get("clusters"):
        cluster_suffix(COMMAND, line.client, options.get("clusters"))
    if options.operands:
        return obey(line, options.operands)
    return _converse(line)


def _converse(line: ControlLine) -> int:
    """Obey the lines on stdin, as without arguments; returns the code of the last that failed."""
    import shlex  # rarely used

    code = 0
    is_person = sys.stdin.isatty()
    while True:
        if is_person:
            sys.stdout.write("scontrol: ")
            sys.stdout.flush()
        text = sys.stdin.readline(_LONGEST_LINE + 1)
        if not text:
            return code
        if len(text) > _LONGEST_LINE:
            raise CommandError(f"scontrol: error: a command has more than {_LONGEST_LINE} characters")
        try:
            words = shlex.split(text)
        except ValueError as error:
            line.complain(f"scontrol: {error}")
            code = 1
            continue
        if not words:
            continue
        if words[0] in ("exit", "quit"):
            return code
        try:
            parsed = parse(COMMAND, words)
            if parsed.operands:
                code = obey(line.with_options(parsed), parsed.operands) or code
        except CommandError as error:
            sys.stdout.flush()
            if not line.is_quiet:
                sys.stderr.write(f"{error.text}\n")
            code = error.code


def obey(line: ControlLine, words: list[str]) -> int:
    """Carry out one line; returns the exit code."""
    keyword, rest = words[0], words[1:]
    verb = _verb(keyword)
    if verb is None:
        if keyword.lower() in NOT_SUPPORTED:
            instead = NOT_SUPPORTED[keyword.lower()]
            raise COMMAND.error(f"{keyword} is not supported" + (f"; use: {instead}" if instead else ""))
        raise CommandError(f"invalid keyword: {printable(keyword)}")
    name, act, least, most = verb
    if len(rest) < least:
        raise CommandError(f"too few arguments for keyword:{name}")
    if most is not None and len(rest) > most:
        raise CommandError(f"too many arguments for keyword:{name}")
    return act(line, rest)


def _verb(keyword: str) -> tuple[str, Callable[[ControlLine, list[str]], int], int, int | None] | None:
    """The verb that a word names or abbreviates."""
    word = keyword.lower()
    for row in _VERBS:
        if row[0] == word:
            return row
    if word in NOT_SUPPORTED:
        return None
    return next((row for row in _VERBS if len(word) > 1 and row[0].startswith(word)), None)


# --- jobs -----------------------------------------------------------------------------------------


def _each_job(
    path: str, extra: dict[str, Any] | None = None, follow_up: str = ""
) -> Callable[[ControlLine, list[str]], int]:
    """A verb that asks the daemon the same for each job, so that one mistake does not keep the others from it."""
    verb = path.rpartition("/")[2]

    def act(line: ControlLine, texts: list[str]) -> int:
        code = 0
        if verb == "requeue":
            _outlive_the_run()
        for word in _with_names(line, _without_state(job_words(texts))):
            if not is_job_id(word):
                line.complain(f"{INVALID_ID} for job {word}")
                code = 1
                continue
            try:
                answer = line.client.call("POST", path, {"ids": [word], **(extra or {})})
                if verb == "resume" and not answer["changed"]:
                    raise Refused(f"job {word} is not suspended")
            except UserError as error:
                why = slurm_error(line, word, error, verb)
                line.complain(f"{why} for job {word}")
                if follow_up:
                    line.complain(f"{follow_up}: {why}")
                line.explain(error)
                code = 1
        return code

    return act


def _outlive_the_run() -> None:
    """Ignore what ends the run of a job that requeues itself: its program is to see that it worked."""
    if "SLURM_JOB_ID" in os.environ:
        import _signal  # type: ignore[import-not-found]  # without the names that `signal` makes of its numbers

        for number in (_signal.SIGTERM, _signal.SIGHUP, _signal.SIGUSR1, _signal.SIGUSR2):
            _signal.signal(number, _signal.SIG_IGN)


def _without_state(words: list[str]) -> list[str]:
    """The ids behind the words that requeuehold may have before them. Raises: CommandError."""
    if not words or "=" not in words[0]:
        return words
    key, _, value = words[0].partition("=")
    if key.lower() == "state" and value.lower() == "specialexit":
        raise COMMAND.error("State=SpecialExit is not supported; omit it to hold the job after the requeue")
    return words


def _with_names(line: ControlLine, words: list[str]) -> list[str]:
    """The ids, with `jobname=train` replaced by the unfinished jobs of that name; an unknown name stays a word."""
    found = []
    for word in words:
        key, sign, name = word.partition("=")
        if not sign or key.lower() not in ("jobname", "name"):
            found.append(word)
            continue
        rows = line.client.call("GET", f"/v1/jobs?fields=id&names={quote(name)}")["rows"]
        found += [str(row[0]) for row in rows] or [word]
    return found


def slurm_error(line: ControlLine, word: str, error: GpuschedError, verb: str) -> str:
    """Slurm's sentence for an error about one job, or ours where it has none."""
    return slurm_sentence(line, word, error, verb) or error.message


def slurm_sentence(line: ControlLine, word: str, error: GpuschedError, verb: str) -> str | None:
    """Slurm's sentence for an error about one job; None where it has none."""
    if isinstance(error, NotFound) or (isinstance(error, UsageError) and verb != "update"):
        return INVALID_ID
    if isinstance(error, Forbidden):
        return "Invalid user id" if verb in ("update", "hold", "release") else DENIED
    if not isinstance(error, Refused):
        return None
    state = state_of(line, word)
    if state == "PENDING" and verb in ("requeue", "suspend", "resume"):
        return "Job is pending execution"
    if state not in ("PENDING", "RUNNING", "SUSPENDED", "COMPLETING", None):
        return "Job/step already completing or completed"
    if verb in ("requeue", "resume") and state in ("RUNNING", "SUSPENDED"):
        return "Requested operation is presently disabled"
    return None


def state_of(line: ControlLine, word: str) -> str | None:
    """The state of a job; None if it cannot be seen."""
    try:
        rows = line.client.call("GET", f"/v1/jobs?fields=state&ids={quote(word)}")["rows"]
    except GpuschedError:
        return None
    return rows[0][0] if rows else None


def _top(line: ControlLine, texts: list[str]) -> int:
    """The queue cannot be reordered by hand."""
    for word in job_words(texts):
        is_known = is_job_id(word) and state_of(line, word) is not None
        line.complain(f"{DENIED if is_known else INVALID_ID} for job {word}")
    return 1


def _wait_job(line: ControlLine, texts: list[str]) -> int:
    word = texts[0]
    if not is_job_id(word):
        line.complain(f"scontrol: {INVALID_ID}: {word}")
        return 1
    state = "PENDING"
    try:
        while state == "PENDING":
            answer = line.client.call("GET", f"/v1/wait?ids={quote(word)}&state_not=PENDING&timeout_s=60")
            state = answer["jobs"][0]["state"]
    except UserError as error:
        line.complain(f"scontrol: Problem running job {word}")
        line.explain(error)
        return 1
    if state in ("RUNNING", "COMPLETING", "SUSPENDED"):
        return 0
    line.complain(f"scontrol: Job {word} is no longer running")
    return 1


def _write(line: ControlLine, texts: list[str]) -> int:
    """`write batch_script ID [FILE]`; `-` is stdout."""
    what = texts[0].lower()
    if len(what) < 2 or not "batch_script".startswith(what):
        if len(what) > 1 and "config".startswith(what):
            raise COMMAND.error("write config is not supported; see: gpusched config show")
        raise CommandError(f"invalid write argument: {printable(texts[0])}")
    if len(texts) < 2:
        raise CommandError("too few arguments for keyword:write batch_script")
    word = texts[1]
    if not is_job_id(word):
        raise CommandError(f"job script retrieval failed: {INVALID_ID}")
    try:
        answer = line.client.call("GET", f"/v1/jobs/{quote(word)}/script")
    except UserError as error:
        line.explain(error)
        why = DENIED if isinstance(error, Forbidden) else INVALID_ID if isinstance(error, NotFound) else error.message
        raise CommandError(f"job script retrieval failed: {why}") from None
    text = answer["script"]
    if text is None:
        import shlex  # a command, not a script

        text = "#!/bin/sh\n" + shlex.join(answer["argv"]) + "\n"
    content = text.encode("utf-8", "surrogateescape")
    path = texts[2] if len(texts) > 2 else f"slurm-{word}.sh"
    if path == "-":
        sys.stdout.flush()
        sys.stdout.buffer.write(content)
        return 0
    try:
        # Only the owner: a script may hold secrets.
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "wb") as file:
            file.write(content)
    except OSError as error:
        raise CommandError(f"failed to write script to file '{printable(path)}': {error.strerror}") from None
    sys.stdout.write(f"batch script for job {word} written to {printable(path)}\n")
    return 0


# --- the rest -------------------------------------------------------------------------------------


def _show(line: ControlLine, texts: list[str]) -> int:
    from gpusched.addons.slurm.scontrol_show import show

    return show(line, texts)


def _update(line: ControlLine, texts: list[str]) -> int:
    from gpusched.addons.slurm.scontrol_update import update

    return update(line, texts)


def _create(line: ControlLine, texts: list[str]) -> int:
    from gpusched.addons.slurm.scontrol_update import create

    return create(line, texts)


def _delete(line: ControlLine, texts: list[str]) -> int:
    from gpusched.addons.slurm.scontrol_update import delete

    return delete(line, texts)


def _ping(line: ControlLine, _: list[str]) -> int:
    try:
        cluster = line.client.call("GET", "/v1/cluster")
    except NotReady as error:
        sys.stdout.write("Slurmctld(primary) at localhost is DOWN\n")
        line.explain(error)
        return 1
    sys.stdout.write(f"Slurmctld(primary) at {cluster['nodes'][0]['name']} is UP\n")
    return 0


def _listpids(line: ControlLine, texts: list[str]) -> int:
    from gpusched.addons.slurm.scontrol_show import list_pids

    return list_pids(line, texts)


def _reconfigure(line: ControlLine, _: list[str]) -> int:
    try:
        line.client.call("POST", "/v1/reload", {})
    except Forbidden as error:
        line.complain("slurm_reconfigure error: Invalid user id")
        line.explain(error)
        return 1
    return 0


def _version(_line: ControlLine, _texts: list[str]) -> int:
    sys.stdout.write(f"{VERSION}\n")
    return 0


def _help(_line: ControlLine, _texts: list[str]) -> int:
    from gpusched.addons.slurm.command import help_text

    keywords = " ".join(row[0] for row in _VERBS)
    sys.stdout.write(f"{help_text(COMMAND)}\nKeywords: {keywords}\n")
    return 0


_FOLLOW_UP = "slurm_suspend error"
"""Slurm says twice why it cannot hold or release a job."""
_LONGEST_LINE = 1 << 20
"""Characters of a command on standard input."""
_VERBS: tuple[tuple[str, Callable[[ControlLine, list[str]], int], int, int | None], ...] = (
    ("show", _show, 1, None),
    ("hold", _each_job("/v1/jobs/hold", follow_up=_FOLLOW_UP), 1, None),
    ("uhold", _each_job("/v1/jobs/hold", follow_up=_FOLLOW_UP), 1, None),
    ("holdu", _each_job("/v1/jobs/hold", follow_up=_FOLLOW_UP), 1, None),
    ("release", _each_job("/v1/jobs/release", follow_up=_FOLLOW_UP), 1, None),
    ("requeue", _each_job("/v1/jobs/requeue"), 1, None),
    ("requeuehold", _each_job("/v1/jobs/requeue", {"hold": True}), 1, None),
    ("suspend", _each_job("/v1/jobs/suspend"), 1, None),
    ("resume", _each_job("/v1/jobs/resume"), 1, None),
    ("update", _update, 1, None),
    ("create", _create, 1, None),
    ("delete", _delete, 1, None),
    ("ping", _ping, 0, 0),
    ("listpids", _listpids, 0, 2),
    ("write", _write, 1, 3),
    ("wait_job", _wait_job, 1, 1),
    ("top", _top, 1, None),
    ("reconfigure", _reconfigure, 0, 0),
    ("version", _version, 0, 0),
    ("help", _help, 0, None),
)
