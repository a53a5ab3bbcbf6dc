"""A run's container: the command in place of the job's own, what only the node knows, and its removal at the end.

A run with ranks has one for each of them. The runtime is a process of the run like any other, started as its user; what
is in the container descends from this process, too, and is found, signalled and killed as everything else.
"""

from __future__ import annotations

import os
import stat
import time

from gpusched.engine import spool as files
from gpusched.engine.container import (
    INFRASTRUCTURE,
    ContainerRun,
    container_name,
    enter_command,
    environment_file,
    inside,
    list_command,
    outside,
    passed_on,
    pull_command,
    remove_command,
    run_command,
    run_of,
)
from gpusched.engine.linux import cdi, proctree
from gpusched.engine.linux.as_user import LaunchError, Owner, as_user, text_of
from gpusched.engine.supervisor.fetching import become_program
from gpusched.engine.supervisor.processes import end_all
from gpusched.model.container import PODMAN, Bind, read_bind, why_not_mounted

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable
    from typing import Any

    from gpusched.engine.supervisor.logs import Logs
    from gpusched.engine.supervisor.pty import Streams

    Find = Callable[[Container[int]], Iterable[proctree.Process]]

HELPER_S = 20.0
"""Longest time for the runtime to list or to remove containers."""
_POLL_S = 0.01
_CLEAR_S = 5.0
_MOST_NAMES = 65536
_MOST_DIGEST = 1024


class RunContainer:
    """The container of one run, or the pull of an image."""

    def __init__(self, ticket: dict[str, Any], spool: str) -> None:
        self._spool = spool
        self._run: str = ticket["run"]
        facts: dict[str, Any] = ticket["container"]
        self._facts = facts
        self._names = [container_name(self._run, spool)]
        """Of the run's container, or of those of its ranks."""
        self._given: dict[str, Any] = {}
        """What all containers of the run have, as arguments of `ContainerRun`."""
        self._devices: dict[str, str] = {}
        """CDI name of each GPU, by UUID."""
        self._owner: Owner | None = None
        self._digest: str | None = None
        self._env: dict[str, str] = {}
        """Of the runtime; empty until it is to be started."""
        self._env_names: list[str] = []
        """Variables that the environment file cannot hold."""

    @property
    def is_pull(self) -> bool:
        return bool(self._facts["is_pull"])

    def command(
        self, ticket: dict[str, Any], argv: list[str], owner: Owner | None, streams: Streams | None
    ) -> list[str]:
        """What is started in place of the job's own command; of ranks, see `rank_command`. Raises: LaunchError.

        Replaces the ticket's environment by that of the runtime.
        """
        facts, runtime = self._facts, self._facts["runtime"]
        self._owner = owner
        env: dict[str, str] = ticket["env"]
        self._env = ticket["env"] = outside(env)
        if facts["is_pull"]:
            self._sweep()
            return pull_command(runtime, facts["program"], facts["image"], facts["pinned"])
        if not facts["image"]:
            raise LaunchError("its image has not been pulled")
        uid = os.geteuid() if owner is None else owner.uid
        try:
            has_devices = runtime == PODMAN and facts["gpus"]
            devices = cdi.names_for(facts["gpus"], cdi.read_devices()) if has_devices else []
        except cdi.CdiError as error:
            raise LaunchError(str(error)) from None
        self._devices = dict(zip((uuid for uuid, _ in facts["gpus"]), devices, strict=False))
        ranks: list[dict[str, Any]] = ticket.get("ranks") or []
        # Each rank has its own values of these, and the file is for all of them.
        apart = {name for rank in ranks for name in rank["env"]}
        text, names = environment_file(runtime, {k: v for k, v in inside(env).items() if k not in apart})
        binds = [*self._own_binds(ticket), *map(read_bind, facts["binds"])]
        self._check(binds, owner)
        self._given = {
            "program": facts["program"],
            "image": facts["image"],
            "argv": argv,
            "work_dir": facts["work_dir"] or ticket["work_dir"],
            "binds": binds,
            "has_gpus": bool(facts["gpus"]),
            "env_file": self._write(text, None if owner is None else uid),
            "label": self._spool,
            "umask": ticket["umask"],
            "is_root": uid == 0,
            "has_terminal": streams is not None and streams.is_terminal,
            "has_streams": streams is not None,
        }
        self._env_names = names
        if ranks:
            self._names = [container_name(self._run, self._spool, rank["number"]) for rank in ranks]
        has_input = ticket.get("stdin_path") is not None
        run = ContainerRun(**self._given, name=self._names[0], devices=devices, env_names=names, has_input=has_input)
        return run_command(runtime, run)

    def rank_command(self, rank: dict[str, Any]) -> tuple[list[str], dict[str, str]]:
        """What is started for one rank once `command` has been called, and the environment of that.

        Args: rank: as in the ticket.
        """
        runtime: str = self._facts["runtime"]
        own: dict[str, str] = rank["env"]
        run = ContainerRun(
            **self._given,
            name=container_name(self._run, self._spool, rank["number"]),
            devices=[name for uuid, name in self._devices.items() if not rank["gpus"] or uuid in rank["gpus"]],
            env_names=[*self._env_names, *own],
            has_input=rank["stdin_path"] is not None,
        )
        return run_command(runtime, run), {**self._env, **passed_on(runtime, own)}

    def enter_command(
        self, argv: list[str], work_dir: str, env: dict[str, str], rank: int | None, is_terminal: bool
    ) -> tuple[list[str], dict[str, str]]:
        """What is started for a command in a run from outside of it, and the environment of that.

        Args: work_dir: inside; empty: that of the run. env: variables to add. rank: of the container; None: the run's.
        """
        runtime: str = self._facts["runtime"]
        given = {**self._given, "argv": argv, "has_terminal": is_terminal, "has_streams": True}
        if work_dir:
            given["work_dir"] = work_dir
        run = ContainerRun(**given, name=container_name(self._run, self._spool, rank), env_names=[*env])
        return enter_command(runtime, run), outside({**self._env, **passed_on(runtime, env)})

    def _own_binds(self, ticket: dict[str, Any]) -> list[Bind]:
        """What every job has outside of containers, too: its folders and files, at the same paths."""
        folder: str = ticket["work_dir"]
        found = [Bind(folder, folder)]
        if (checkpoints := ticket["env"].get("GPUSCHED_CHECKPOINT_DIR")) is not None:
            found.append(Bind(checkpoints, checkpoints))
        if ticket["script"] is not None:
            script = files.script_path(self._spool, self._run)
            found.append(Bind(script, script, True))
        for path in (files.checkpoint_path(self._spool, self._run), files.progress_path(self._spool, self._run)):
            # As root makes them for users: dated to the epoch, so that they count as untouched.
            try:
                os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
                os.utime(path, (0, 0))
            except FileExistsError:
                pass
            except OSError:
                continue
            found.append(Bind(path, path))
        return found

    def _check(self, binds: Iterable[Bind], owner: Owner | None) -> None:
        """Look at what is mounted with the user's rights: links may lead elsewhere. Raises: LaunchError."""

        def look() -> None:
            for bind in binds:
                try:
                    mode = os.stat(bind.source).st_mode
                except OSError as error:
                    raise LaunchError(f"cannot mount {bind.source} into the container: {text_of(error)}") from None
                is_own = bind.source.startswith(f"{self._spool}/{self._run}.")
                if is_own:
                    continue
                why = why_not_mounted(os.path.realpath(bind.source))
                if why is None and stat.S_ISSOCK(mode):
                    why = f"{bind.source} is a socket, and none is mounted into containers"
                if why is not None:
                    raise LaunchError(why)

        as_user(owner, look)

    def _write(self, text: str, uid: int | None) -> str:
        path = files.env_path(self._spool, self._run)
        try:
            files.write_for(uid, path, text.encode("utf-8", "surrogateescape"), 0o600)
        except OSError as error:
            raise LaunchError(f"cannot write the container's environment to {path}: {error.strerror}") from None
        return path

    # --- signals --------------------------------------------------------------------------------

    def of_job(self, find: Find) -> Find:
        """The job's own processes, without the runtime's; all of them as long as there are none of its own."""

        def found(settled: Container[int] = ()) -> Iterable[proctree.Process]:
            everything = list(find(settled))
            return self.without_runtime(everything) or everything

        return found

    def first_of_job(self, find: Find) -> list[int]:
        """Pids of the processes that the runtime itself started in the container."""
        everything = {process.pid: process for process in find(())}
        return [
            process.pid
            for process in everything.values()
            if process.name not in INFRASTRUCTURE
            and process.ppid in everything
            and everything[process.ppid].name in INFRASTRUCTURE
        ]

    def without_runtime(self, processes: Iterable[proctree.Process]) -> list[proctree.Process]:
        return [process for process in processes if process.name not in INFRASTRUCTURE]

    def is_over(self, find: Find) -> bool:
        """Whether only processes of the runtime are left."""
        return not self.without_runtime(find(()))

    # --- pulls ----------------------------------------------------------------------------------

    def take_digest(self, logs: Logs) -> str:
        """The last line that a successful pull has written, the image by digest; its output is removed.

        Few want to keep it, and the user did not ask for the file. The caller must check the line.
        """
        if self._digest is None:
            self._digest = self._read_digest(logs)
        return self._digest

    def _read_digest(self, logs: Logs) -> str:
        from gpusched.engine.supervisor import output_tail  # no other run that succeeds needs it

        def take() -> str:
            (fd, begin), *_ = logs.tails()
            found = output_tail.read_tail(fd, begin).decode("utf-8", "replace").strip().rpartition("\n")[2]
            path = os.readlink(f"/proc/self/fd/{fd}")
            if stat.S_ISREG(os.fstat(fd).st_mode) and os.path.samestat(os.lstat(path), os.fstat(fd)):
                os.unlink(path)
            # It goes into an event, which has to fit into one atomic write.
            return found if len(found.encode("ascii", "backslashreplace")) <= _MOST_DIGEST else ""

        try:
            return as_user(self._owner, take)
        except (OSError, LaunchError):
            return ""

    # --- removal --------------------------------------------------------------------------------

    def remove(self) -> None:
        """Remove what the runtime still knows of the run's containers, and end what that leaves behind."""
        if not self._env or self.is_pull:
            return
        command = remove_command(self._facts["runtime"], self._facts["program"], self._names)
        if command is not None:
            self._ask(command)

    def _sweep(self) -> None:
        """Remove containers of runs whose supervisors were killed."""
        command = list_command(self._facts["runtime"], self._facts["program"], self._spool)
        if command is None:
            return
        for name in self._ask(command).split():
            run = run_of(name, self._spool)
            if run is None:
                continue
            try:
                record = files.read_record(self._spool, run)
            except (OSError, ValueError):
                continue
            if record is not None and record.is_held:
                continue
            removal = remove_command(self._facts["runtime"], self._facts["program"], [name])
            if removal is not None:
                self._ask(removal)

    def _ask(self, argv: list[str]) -> str:
        """Have the runtime do something as the user; returns its output. Kills what it leaves, a pause process."""
        told, tell = os.pipe2(os.O_CLOEXEC)
        pid = os.fork()
        if pid == 0:
            become_program(argv, tell, self._owner, self._env)
        os.close(tell)
        os.set_blocking(told, False)
        said = b""
        until = time.monotonic() + HELPER_S
        try:
            while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                said += _read(told, said)
                if time.monotonic() > until:
                    os.kill(pid, 9)
                    break
                time.sleep(_POLL_S)
            os.waitpid(pid, 0)
            said += _read(told, said)
        finally:
            os.close(told)
        end_all(_CLEAR_S)
        return said.decode("utf-8", "replace")


def _read(fd: int, before: bytes) -> bytes:
    try:
        return os.read(fd, 4096) if len(before) < _MOST_NAMES else b""
    except BlockingIOError:
        return b""
