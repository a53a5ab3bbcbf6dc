"""Slurm's commands as child processes: each has a deadline, and those for one user's job are that user's.

They are called on threads of the engine, never on the daemon's own.
"""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import IO

from gpusched.addons.slurm.engine.answers import RunRecord, last_words, read_record
from gpusched.slurm_commands import is_ours

NEEDED = ("sbatch", "squeue", "scancel")
"""Without one of these nothing is handed over; sacct and scontrol are asked where they are."""
MOST_OUTPUT = 64 << 20
_GRACE_S = 5
_FILES = ("claim", "started", "result")
_MOST_RECORD = 4096

READ_RECORDS = """
for record; do
  for name in claim started result; do
    printf '%s\\n' "== $record/$name"
    [ -f "$record/$name" ] && head -c 4096 "$record/$name"
    printf '\\n'
  done
done
"""
REMOVE_RECORDS = """
for record; do
  for name in claim started result script first checkpoint started.new result.new; do rm -f -- "$record/$name"; done
  rmdir -- "$record"
done
"""
MAKE_FOLDERS = 'for folder; do mkdir -p -- "$folder"; done'


@dataclass(frozen=True, slots=True)
class Account:
    """The user that a command runs as."""

    uid: int
    gid: int
    name: str
    home: str
    groups: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CommandAnswer:
    """What one command answered."""

    code: int | None
    """None: it did not end in time, or could not be started."""
    output: str
    error: str

    @property
    def is_good(self) -> bool:
        return self.code == 0

    @property
    def said(self) -> str:
        """Why it failed, in a few words."""
        return "it did not answer in time" if self.code is None and not self.error else last_words(self.error)


def why_not(folder: str | None) -> str | None:
    """Why no job can be handed over with the commands of this folder, as a sentence; None if jobs can."""
    if folder is None:
        return "no Slurm is configured on this server"
    for name in NEEDED:
        path = os.path.join(folder, name)
        if not os.access(path, os.X_OK) or os.path.isdir(path):
            return f"Slurm's {name} is not in {folder}"
        if is_ours(os.path.realpath(path)):
            return f"{path} is gpusched's own command of that name, not Slurm's"
    return None


class SlurmCommands:
    """The commands of one folder.

    Args: deadline_s: of each call. is_root: whether calls for a job become its user.
    """

    def __init__(self, folder: str, deadline_s: float, *, is_root: bool) -> None:
        self.folder = folder
        self._deadline_s = deadline_s
        self._is_root = is_root
        self._timeout = shutil.which("timeout") or "/usr/bin/timeout"

    def has(self, name: str) -> bool:
        """Whether the site has this command."""
        return os.access(os.path.join(self.folder, name), os.X_OK)

    def account(self, uid: int, name: str) -> Account:
        """The account of a run's user. Raises: KeyError, OSError, ValueError if it is not the one that submitted."""
        entry = pwd.getpwuid(uid)
        if name and entry.pw_name != name:
            raise ValueError(f"uid {uid} belongs to {entry.pw_name} now, not to {name}")
        groups = os.getgrouplist(entry.pw_name, entry.pw_gid) if self._is_root else []
        return Account(uid, entry.pw_gid, entry.pw_name, entry.pw_dir, tuple(groups))

    def slurm(self, name: str, *words: str, account: Account | None = None) -> CommandAnswer:
        """Call one of Slurm's commands and wait for its answer."""
        return self._call([os.path.join(self.folder, name), *words], account)

    def submit(self, script: bytes, output: int, account: Account) -> CommandAnswer:
        """Call sbatch with this script; its output goes to the descriptor, which it holds while it runs.

        It ends by itself at the deadline, also without this process.
        """
        return self._call([os.path.join(self.folder, "sbatch"), "--parsable"], account, script, output)

    def shell(self, text: str, words: Iterable[str], account: Account) -> CommandAnswer:
        """Run a line of ours with these words as the user."""
        return self._call(["/bin/sh", "-c", text, "sh", *words], account)

    def records(self, folders: Sequence[str], account: Account) -> dict[str, RunRecord] | None:
        """Read the records in these folders as their owner; None if they cannot be looked at now."""
        answer = self.shell(READ_RECORDS, folders, account)
        if not answer.is_good:
            return None
        parts: dict[str, str] = {}
        for part in f"\n{answer.output}".split("\n== ")[1:]:
            path, _, text = part.partition("\n")
            parts[path] = text[:_MOST_RECORD]
        return {folder: read_record(*(parts.get(f"{folder}/{name}", "") for name in _FILES)) for folder in folders}

    def _call(
        self, argv: Sequence[str], account: Account | None, given: bytes = b"", output: int | None = None
    ) -> CommandAnswer:
        limit = [self._timeout, "-k", str(_GRACE_S), f"{self._deadline_s:g}"]
        who = account if self._is_root else None
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as error, tempfile.TemporaryFile() as text:
            text.write(given)
            text.seek(0)
            try:
                process = subprocess.Popen(
                    [*limit, *argv],
                    stdin=text,
                    stdout=out if output is None else output,
                    stderr=error,
                    cwd="/",
                    env=self._environment(account),
                    start_new_session=True,
                    umask=0o077,
                    user=None if who is None else who.uid,
                    group=None if who is None else who.gid,
                    extra_groups=None if who is None else who.groups,
                )
            except OSError as problem:
                return CommandAnswer(None, "", f"{argv[0]}: {problem.strerror}")
            try:
                code = process.wait(self._deadline_s + 2 * _GRACE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                return CommandAnswer(None, "", "")
            # Killed, by the deadline or otherwise: what it has done is unknown.
            is_known = code >= 0 and code not in (124, 137)
            return CommandAnswer(code if is_known else None, "" if output is not None else _text(out), _text(error))

    def _environment(self, account: Account | None) -> dict[str, str]:
        env = {"PATH": f"{self.folder}:/usr/local/bin:/usr/bin:/bin", "LC_ALL": "C", "SLURM_TIME_FORMAT": "%s"}
        for name in ("SLURM_CONF", "TZ"):
            if name in os.environ:
                env[name] = os.environ[name]
        if account is not None:
            env.update({"HOME": account.home, "USER": account.name, "LOGNAME": account.name})
        return env


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read(MOST_OUTPUT).decode("utf-8", "replace")
