"""Starts the first process of a run: identity, work dir, log files, exec. Runs in the supervisor."""

from __future__ import annotations

import errno
import os
import pwd
import select
import stat
import sys
import time

from gpusched.engine import spool as files
from gpusched.engine.linux.as_user import DEFAULT_PATH, LaunchError, Owner, as_user, text_of, why_unsafe
from gpusched.engine.supervisor.logs import Logs, MovedOutput, OutputError, open_log

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal
    from collections.abc import Callable, Container
    from typing import Any, NoReturn, TypeVar

    _Opened = TypeVar("_Opened")

    from gpusched.engine.linux.cgroup import RunCgroup
    from gpusched.engine.supervisor.container import RunContainer
    from gpusched.engine.supervisor.pty import Streams
    from gpusched.engine.supervisor.ranks import Ranks

    StartCommand = Callable[[], tuple[int, Logs, Ranks | None]]
else:
    import _signal as signal


ACCOUNT_CHECK_S = 10.0
"""How long our own account is assumed to be as last read, which takes six system calls."""
LINGER = "/var/lib/systemd/linger"
"""Contains a file for each user whose runtime folder exists without a login. Source: logind.conf(5), loginctl(1)."""


def account_of(uid: int, user: str) -> pwd.struct_passwd:
    """The submitter's account. Raises: LaunchError when it is gone, or its uid belongs to another account now."""
    try:
        account = pwd.getpwuid(uid)
    except KeyError:
        raise LaunchError(f"cannot start as user {user}: this machine has no account with uid {uid}") from None
    if account.pw_name != user:
        # The uid was reused after its owner had left.
        raise LaunchError(f"cannot start as user {user}: uid {uid} now belongs to account {account.pw_name}")
    return account


class OwnAccount:
    """The account of this process's user, as one supervisor needs it for one run after another."""

    def __init__(self) -> None:
        self._found: pwd.struct_passwd | None = None
        self._until = 0.0

    def look(self, uid: int) -> pwd.struct_passwd | None:
        """The account with this uid, read again after some seconds; None where there is none."""
        now = time.monotonic()
        if self._found is None or self._found.pw_uid != uid or now >= self._until:
            try:
                self._found, self._until = pwd.getpwuid(uid), now + ACCOUNT_CHECK_S
            except KeyError:
                self._found = None
        return self._found


_own_account = OwnAccount()


def complete(env: dict[str, str], uid: int, foreign: bool, account: pwd.struct_passwd | None = None) -> None:
    """Add variables of every account that this environment lacks, and drop those that will point nowhere.

    The submitter's runtime folder disappears with their last login, possibly during the job, unless the account
    lingers.

    Args: account: that of `uid` if already known.
    """
    env.setdefault("PATH", DEFAULT_PATH)
    if not env.keys() >= {"HOME", "USER", "LOGNAME", "SHELL"}:
        account = account or _own_account.look(uid)
        if account is not None:
            env.setdefault("HOME", account.pw_dir or "/")
            env.setdefault("USER", account.pw_name)
            env.setdefault("LOGNAME", account.pw_name)
            env.setdefault("SHELL", account.pw_shell or "/bin/sh")
    folder = env.get("XDG_RUNTIME_DIR")
    if folder and not _will_be_there(folder, uid, foreign):
        del env["XDG_RUNTIME_DIR"]
        if f"={folder}/" in env.get("DBUS_SESSION_BUS_ADDRESS", ""):
            del env["DBUS_SESSION_BUS_ADDRESS"]


def _will_be_there(folder: str, uid: int, foreign: bool) -> bool:
    try:
        if os.stat(folder).st_uid != uid:
            return False
    except (OSError, ValueError):
        return False
    if not foreign or folder != f"/run/user/{uid}":
        return True
    try:
        return os.path.exists(f"{LINGER}/{pwd.getpwuid(uid).pw_name}")
    except KeyError:
        return False


BECOME_S = 60.0
"""Time to load a program from a file server; a process stopped by its user takes longer."""
RESETTABLE = frozenset(signal.valid_signals()) - {signal.SIGKILL, signal.SIGSTOP}
"""All signals that must have their default action in a job: Python ignores some, a nohup'ed daemon more."""


BASE_FLAGS = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
BASE_CHECK_S = 10.0
"""How long a folder and its path are assumed to be as safe from other users as last checked."""


def start(
    ticket: dict[str, Any],
    spool: str,
    checkpoints: CheckpointBase,
    streams: Streams | None = None,
    box: RunCgroup | None = None,
    container: RunContainer | None = None,
) -> tuple[int, Logs, Ranks | None, StartCommand | None]:
    """Start the job's first process; returns its pid and log files once it has become the job's program.

    For a ticket with ranks it starts all of them, and returns the first one's pid and all of them. For a ticket with
    a prolog that is the first process, and the last value starts the command when it has succeeded.

    Changes this process's work dir. Args: checkpoints: creates the job's checkpoint folder. streams: replace the log
    files and /dev/null. box: entered before anything of the job runs. container: what it runs in.
    Raises: LaunchError.
    """
    owner, no_folder = prepare(ticket, spool, checkpoints)
    argv = list(ticket["argv"])
    if ticket["script"] is not None:
        argv.insert(0, _write_script(ticket, spool, None if owner is None else owner.uid))
    if not argv or not argv[0]:
        raise LaunchError("the command is empty")
    if owner is not None and streams is not None:
        streams.give_to(owner.uid)
    if container is not None:
        argv = container.command(ticket, argv, owner, streams)
    with_ranks = bool(ticket.get("ranks"))
    has_input = streams is None and not with_ranks and ticket.get("stdin_path") is not None

    def opened(ticket: dict[str, Any], action: Callable[[], _Opened]) -> _Opened:
        return checkpoints.with_spare_output(ticket, owner, action)

    logs, given = opened(ticket, lambda: _enter(ticket, has_input))

    def start_command() -> tuple[int, Logs, Ranks | None]:
        nonlocal logs
        ranks = None
        try:
            if with_ranks:
                from gpusched.engine.supervisor.ranks import start_ranks  # few jobs have any

                ranks = start_ranks(ticket, argv, logs, owner, box, opened, container)
                if ranks.rotated:
                    from gpusched.engine.supervisor.rotation import RotatedLogs

                    if not isinstance(logs, RotatedLogs):
                        logs = RotatedLogs(logs, ticket, owner)
                        logs.owner = owner
                    logs.copy_also(ranks.rotated)
                pid = next(iter(ranks.alive))
            else:
                pid = start_process(ticket, argv, logs, given, owner, box, streams)
        finally:
            if given is not None:
                os.close(given)
        if ticket.get("epilog") is None:
            logs.begin()
        return pid, logs, ranks

    try:
        if streams is None and (ticket["log_max_mib"] is not None or logs.moved):
            from gpusched.engine.supervisor.rotation import RotatedLogs  # few jobs ask for it

            logs = RotatedLogs(logs, ticket, owner)
        logs.owner = owner
        if no_folder is not None:
            logs.say(f"job {ticket['run'].partition('.')[0]} has no checkpoint folder: {no_folder}")
        if ticket.get("prolog") is None:
            return *start_command(), None
        try:
            pid = start_process({**ticket, "script": None}, [ticket["prolog"]], logs, None, owner, box)
        except LaunchError as error:
            if given is not None:
                os.close(given)
            raise LaunchError(f"its prolog was not started: {error}") from None
    except LaunchError:
        logs.close()
        raise
    return pid, logs, None, start_command


def prepare(ticket: dict[str, Any], spool: str, checkpoints: CheckpointBase) -> tuple[Owner | None, str | None]:
    """Complete the environment, and make the job's files and checkpoint folder.

    Returns: identity of the run's user, None if that is our own; a sentence where there is no checkpoint folder.
    Raises: LaunchError.
    """
    account, owner = owner_of(ticket)
    complete(ticket["env"], ticket["uid"], owner is not None, account)
    if "SLURM_JOB_ID" in ticket["env"]:
        ticket["env"]["SLURM_JOB_GID"] = str(os.getegid() if account is None else account.pw_gid)
    if owner is not None:
        _make_files(spool, ticket["run"], owner.uid)
    return owner, checkpoints.make_folder(ticket, owner)


def start_process(
    ticket: dict[str, Any],
    argv: list[str],
    logs: Logs | None,
    given: int | None,
    owner: Owner | None,
    box: RunCgroup | None,
    streams: Streams | None = None,
) -> int:
    """Start one process of a run; returns its pid once it has become its program. Raises: LaunchError."""
    if owner is not None or box is not None:
        return _fork_as(ticket, argv, logs, given, owner, streams, box)
    return _spawn(ticket, argv, logs, given, streams)


def start_visitor(ticket: dict[str, Any], streams: Streams, box: RunCgroup | None, module: str | None = None) -> int:
    """Start another process in a run; returns its pid once it has become its program.

    Changes this process's work dir. Args: ticket: as of the run, with the command and complete environment of the
    process. box: that of the run. module: of gpusched; its `main` runs in place of a command. Raises: LaunchError.
    """
    _, owner = owner_of(ticket)
    argv = list(ticket["argv"])
    if not argv[0]:
        raise LaunchError("the command is empty")
    if owner is not None:
        streams.give_to(owner.uid)
    as_user(owner, lambda: _enter_folder(ticket))
    if module is not None:
        return _fork_as(ticket, argv, None, None, owner, streams, box, module)
    return start_process(ticket, argv, None, None, owner, box, streams)


def owner_of(ticket: dict[str, Any]) -> tuple[pwd.struct_passwd | None, Owner | None]:
    """Account and identity of the run's user, None if that is our own. Raises: LaunchError."""
    uid, own = ticket["uid"], os.geteuid()
    if uid == own:
        return None, None
    if own != 0:
        raise LaunchError(f"cannot start as user {ticket['user']} (uid {uid}): gpuschedd runs as uid {own}, not root")
    account = account_of(uid, ticket["user"])
    return account, Owner(ticket["user"], uid, account.pw_gid)


def _write_script(ticket: dict[str, Any], spool: str, uid: int | None) -> str:
    path = files.script_path(spool, ticket["run"])
    try:
        files.write_for(uid, path, ticket["script"], 0o700)
    except OSError as error:
        raise LaunchError(f"cannot write the job's script to {path}: {error.strerror}") from None
    return path


def _make_files(spool: str, run: str, owner: int) -> None:
    """Create the job's files in advance, dated to the epoch (untouched): other users can create none in the spool."""
    for path in (files.checkpoint_path(spool, run), files.progress_path(spool, run)):
        try:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            try:
                os.fchown(fd, owner, -1)
                os.utime(fd, (0, 0))
            finally:
                os.close(fd)
        except OSError:
            # A full disk: the job runs without it.
            pass


def _enter(ticket: dict[str, Any], has_input: bool) -> tuple[Logs, int | None]:
    """Enter the work dir and open the log files and the input, if any, with this process's current rights."""
    _enter_folder(ticket)
    given = open_input(ticket["stdin_path"]) if has_input else None
    try:
        return open_logs(ticket), given
    except LaunchError:
        if given is not None:
            os.close(given)
        raise


def _enter_folder(ticket: dict[str, Any]) -> None:
    work_dir: str = ticket["work_dir"]
    try:
        os.chdir(work_dir)
    except (OSError, ValueError) as error:
        snapshot = ticket.get("snapshot")
        if snapshot is not None and isinstance(error, FileNotFoundError):
            raise LaunchError(f"its snapshot {snapshot} is gone: there is no {work_dir}") from None
        raise LaunchError(f"cannot enter the working directory {work_dir}: {text_of(error)}") from None


def open_input(path: str) -> int:
    """Open the job's standard input. Raises: LaunchError."""
    try:
        # Not waiting for the writer of a pipe: the job does so itself.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK)
    except (OSError, ValueError) as error:
        raise LaunchError(f"cannot read the input from {path}: {text_of(error)}") from None
    os.set_blocking(fd, True)
    return fd


def open_logs(ticket: dict[str, Any], opened: Container[str | None] = ()) -> Logs:
    """Open the log files with this process's current rights. Args: opened: paths that are not to be truncated again.

    What cannot be written is moved into the folder `spare_output` of the ticket, if that names one, under its whole
    path. Raises: LaunchError.
    """
    before = os.umask(ticket["umask"])
    again = {**ticket, "append": True}
    moved: dict[str | None, MovedOutput] = {}

    def open_one(path: str, what: str) -> int:
        how = again if path in opened else ticket
        try:
            return open_log(path, how, what)
        except OutputError as error:
            if not (folder := ticket.get("spare_output")):
                raise
            spare = folder + os.path.normpath(os.path.join("/", ticket["work_dir"], path))
            try:
                fd = open_log(spare, how, what)
            except LaunchError as other:
                raise LaunchError(f"{error}; {other}") from None
            moved[path] = MovedOutput(spare, f"{error}; it is kept in {folder} on {ticket['node']}")
            return fd

    try:
        path, error_path = ticket["stdout_path"], ticket["stderr_path"]
        output = open_one(path, "output")
        if error_path is None or error_path == path:
            logs = Logs(output, output)
        else:
            try:
                logs = Logs(output, open_one(error_path, "error output"))
            except LaunchError:
                os.close(output)
                raise
        logs.moved = moved
        return logs
    finally:
        os.umask(before)


class CheckpointBase:
    """The parent of all checkpoint folders, with what one supervisor knows of it from its earlier runs."""

    def __init__(self) -> None:
        self._safe: tuple[object, ...] = ()
        """What `why_unsafe` has found safe: its path, for whom, and how it was then."""
        self._until = 0.0

    def make_folder(self, ticket: dict[str, Any], owner: Owner | None) -> str | None:
        """Create the job's checkpoint folder, or find that of its earlier runs; a sentence when it gets none.

        Root creates it for its owner in a folder where users can create nothing, so that no other user can be first.
        Elsewhere it is created with the user's rights. An existing entry that is not a folder of that user is never
        used: its owner could change what the job reads, and runs, from it.
        """
        path = ticket["checkpoint_dir"]
        if path is None:
            return None
        try:
            self._make(path, owner, ticket.get("spare_checkpoint_dir"))
        except LaunchError as error:
            ticket["env"].pop("GPUSCHED_CHECKPOINT_DIR", None)
            return str(error)
        return None

    def with_spare_output(self, ticket: dict[str, Any], owner: Owner | None, action: Callable[[], _Opened]) -> _Opened:
        """Open output files with the user's rights; again with the folder `spare_output`, made in the same way, if one
        cannot be written and the ticket names where such folders are. Raises: LaunchError.
        """
        try:
            return as_user(owner, action)
        except OutputError as error:
            if not ticket.get("outputs") or ticket.get("spare_output"):
                raise
            folder = f"{ticket['outputs']}/{ticket['run']}"
            try:
                self._make(folder, owner)
            except LaunchError as other:
                raise LaunchError(f"{error}; {other}") from None
        ticket["spare_output"] = folder
        return as_user(owner, action)

    def _make(self, path: str, owner: Owner | None, spare: str | None = None) -> None:
        """Create a folder of this user alone, or find it. Args: spare: to be renamed instead. Raises: LaunchError."""
        base, _, name = path.rpartition("/")
        try:
            parent = self._open(base, owner is not None)
            try:
                if spare is not None and owner is None and _take_over(parent, spare.rpartition("/"), base, name):
                    return
                if owner is not None and os.fstat(parent).st_mode & 0o022:
                    as_user(owner, lambda: _make_own_folder(parent, name, path, owner))
                else:
                    _make_own_folder(parent, name, path, owner)
            finally:
                os.close(parent)
        except (OSError, ValueError) as error:
            raise LaunchError(f"cannot make {path}: {text_of(error)}") from None

    def _open(self, base: str, foreign: bool) -> int:
        """Open or create the folder. Raises: LaunchError when a user could replace its content; OSError."""
        try:
            folder = os.open(base, BASE_FLAGS)
        except OSError:
            pass
        else:
            if time.monotonic() < self._until and _known_as(folder, base, foreign) == self._safe:
                return folder
            os.close(folder)
        if not os.path.lexists(base):
            _make_base(base, foreign)
        if (why_not := why_unsafe(base, for_others=foreign)) is not None:
            raise LaunchError(why_not)
        folder = os.open(base, BASE_FLAGS)
        self._safe, self._until = _known_as(folder, base, foreign), time.monotonic() + BASE_CHECK_S
        return folder


def _known_as(folder: int, base: str, foreign: bool) -> tuple[object, ...]:
    found = os.fstat(folder)
    return base, foreign, found.st_dev, found.st_ino, found.st_mode, found.st_uid


def _make_base(base: str, foreign: bool) -> None:
    """Create the parent of all checkpoint folders. Raises: LaunchError: root would follow a user's link; OSError."""
    if foreign and (why_not := why_unsafe(_nearest(base), for_others=True)) is not None:
        raise LaunchError(why_not)
    # Under root all users traverse it to their own.
    before = os.umask(0o066 if os.geteuid() == 0 else 0o077)
    try:
        os.makedirs(base, exist_ok=True)
    finally:
        os.umask(before)


def _nearest(path: str) -> str:
    """The existing part of a path, dangling links included."""
    while not os.path.lexists(path):
        path = os.path.dirname(path)
    return path


def _take_over(parent: int, spare: tuple[str, str, str], base: str, name: str) -> bool:
    """Rename an empty folder of our own; False if that cannot be done.

    File systems take long to find room for a new one.
    """
    spare_base, _, spare_name = spare
    if spare_base != base:
        return False
    try:
        found = os.stat(spare_name, dir_fd=parent, follow_symlinks=False)
        is_own = found.st_uid == os.geteuid() and found.st_mode == stat.S_IFDIR | 0o700
        # By its path: listing an open folder takes twice as many system calls. Only its user could replace it now.
        if not is_own or os.listdir(f"{base}/{spare_name}"):
            return False
        os.rename(spare_name, name, src_dir_fd=parent, dst_dir_fd=parent)
    except OSError:
        return False
    return True


def _make_own_folder(parent: int, name: str, path: str, owner: Owner | None) -> None:
    """Create a folder for one user alone, or find it. Raises: LaunchError for another user's; OSError."""
    try:
        os.mkdir(name, 0o700, dir_fd=parent)
    except FileExistsError:
        pass
    else:
        if owner is None or os.geteuid() == owner.uid:
            return
    folder = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
    try:
        found, own = os.fstat(folder).st_uid, os.geteuid()
        if owner is not None and found == own != owner.uid:
            # Created just now, or by a supervisor that was killed before this point.
            os.fchown(folder, owner.uid, owner.gid)
        elif found != (own if owner is None else owner.uid):
            raise LaunchError(f"{path} belongs to uid {found}")
    finally:
        os.close(folder)


def _spawn(
    ticket: dict[str, Any], argv: list[str], logs: Logs | None, given: int | None, streams: Streams | None
) -> int:
    """Args: logs: None with streams of a visitor."""
    env: dict[str, str] = ticket["env"]
    actions: list[Any] = []
    leads: dict[str, Any] = {"setpgroup": 0}
    if streams is None:
        assert logs is not None
        output, error_output = logs.job_ends()
        # Standard input is /dev/null in the fork server already.
        actions = [(os.POSIX_SPAWN_DUP2, output, 1), (os.POSIX_SPAWN_DUP2, error_output, 2)]
        if given is not None:
            actions.append((os.POSIX_SPAWN_DUP2, given, 0))
    else:
        actions = streams.file_actions()
        if streams.is_terminal:
            # A terminal belongs to one session, and the supervisor keeps its own.
            leads = {"setsid": True}
    before = os.umask(ticket["umask"])
    try:
        return os.posix_spawn(
            _find(argv[0], env),
            argv,
            env,
            file_actions=actions,
            setsigmask=(),
            setsigdef=RESETTABLE,
            **leads,
        )
    except (OSError, ValueError) as error:
        raise LaunchError(_sentence(error, argv[0], ticket)) from None
    finally:
        os.umask(before)


def _fork_as(
    ticket: dict[str, Any],
    argv: list[str],
    logs: Logs | None,
    given: int | None,
    owner: Owner | None,
    streams: Streams | None,
    box: RunCgroup | None,
    module: str | None = None,
) -> int:
    report, told = os.pipe()
    try:
        pid = os.fork()
    except OSError as error:
        os.close(report)
        os.close(told)
        raise LaunchError(_sentence(error, argv[0], ticket)) from None
    if pid == 0:
        try:
            os.close(report)
            become: Callable[[], None] | None = None
            inherited: list[int] = []
            if module is not None:
                # Its user may not list them.
                inherited = inherited_fds()
                _set_name(b"gpusched-step")
                # Code of this installation, as all that runs here: the user may be unable to read it.
                become = __import__(module, fromlist=("main",)).main
            if box is not None:
                box.enter()
            if owner is not None:
                if ticket["pam"]:
                    from gpusched.engine.linux import pam  # loaded by the job alone

                    if pam.is_wanted():
                        pam.open_session(ticket["user"])
                owner.become()
            if streams is not None and streams.is_terminal:
                os.setsid()
            else:
                os.setpgid(0, 0)
            if streams is None:
                assert logs is not None
                output, error_output = logs.job_ends()
                os.dup2(output, 1)
                os.dup2(error_output, 2)
                if given is not None:
                    os.dup2(given, 0)
            else:
                streams.enter()
            os.umask(ticket["umask"])
            reset_signals()
            if "SLURM_JOB_ID" in ticket["env"]:
                ticket["env"]["SLURM_TASK_PID"] = str(os.getpid())
            if become is not None:
                _go_on_as(become, argv, ticket["env"], inherited)
            os.execve(_find(argv[0], ticket["env"]), argv, ticket["env"])
        except LaunchError as error:
            sentence = str(error)
        except BaseException as error:
            sentence = _sentence(error, argv[0], ticket)
        os.write(told, sentence.encode("utf-8", "surrogateescape"))
        os._exit(127)
    os.close(told)
    sentence = _hear(report, pid)
    os.close(report)
    if sentence:
        os.waitpid(pid, 0)
        raise LaunchError(sentence)
    return pid


def reset_signals() -> None:
    """In a child: admit all signals, with their default action: ignored ones would stay ignored across exec."""
    for number in RESETTABLE:
        if signal.getsignal(number) != signal.SIG_DFL:
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def inherited_fds() -> list[int]:
    """All descriptors of this process but standard streams; one of them, of the listing itself, is closed already."""
    return [int(fd) for fd in os.listdir("/proc/self/fd") if int(fd) > 2]


def close_all(fds: list[int]) -> None:
    """Close descriptors, open or not."""
    for fd in fds:
        try:
            os.close(fd)
        except OSError:
            continue


def _set_name(name: bytes) -> None:
    """Name this process for `ps`: at most 15 bytes."""
    fd = os.open("/proc/self/comm", os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, name)
    finally:
        os.close(fd)


def _go_on_as(main: Callable[[], None], argv: list[str], env: dict[str, str], inherited: list[int]) -> NoReturn:
    """Go on as a program of our own installation, without its interpreter's start, which takes longer than its work.

    Nothing of this process is left to it but code: the identity has changed, which keeps its user from tracing it, all
    other descriptors are closed, and what is in memory concerns the user's own run.
    """
    signal.set_wakeup_fd(-1)
    os.environ.clear()
    os.environ.update(env)
    sys.argv[:] = argv
    # With the report of errors, which tells the supervisor that all is well.
    close_all(inherited)
    try:
        main()
    finally:
        os._exit(70)


def _hear(report: int, pid: int) -> str:
    """Read a child's report of why it could not become the job's program; empty when it has.

    After its change of identity its user may stop it, and this process would wait forever, deaf to all orders.
    """
    poll = select.poll()
    poll.register(report, select.POLLIN)
    if not poll.poll(BECOME_S * 1000):
        os.kill(pid, signal.SIGKILL)
        return f"its first process did not start its program within {BECOME_S:g} s"
    # Closed by a successful exec.
    return os.read(report, 65536).decode("utf-8", "surrogateescape")


def _find(name: str, env: dict[str, str]) -> str:
    if "/" in name:
        return name
    reason = "is not in the job's PATH"
    for folder in env.get("PATH", DEFAULT_PATH).split(":"):
        path = f"{folder or '.'}/{name}"
        try:
            if not stat.S_ISREG(os.stat(path).st_mode):
                continue
        except OSError:
            continue
        if os.access(path, os.X_OK):
            return path
        reason = f"is not executable ({path})"
    raise LaunchError(f"cannot run {name}: it {reason}")


def _sentence(error: BaseException, command: str, ticket: dict[str, Any]) -> str:
    name = command
    if ticket["script"] is not None:
        first = ticket["script"].split(b"\n", 1)[0][:80].decode("utf-8", "replace")
        name = f"the job's script (first line {first!r})"
    code = error.errno if isinstance(error, OSError) else None
    if code == errno.ENOEXEC:
        return f"cannot run {name}: it is neither a program nor a script with a #! line"
    if code == errno.ENOENT and os.path.exists(command):
        return f"cannot run {name}: the interpreter in its #! line does not exist"
    if code == errno.EACCES and os.access(command, os.R_OK) and _is_noexec(command):
        return f"cannot run {name}: {os.path.dirname(command) or '.'} is on a file system mounted noexec"
    return f"cannot run {name}: {text_of(error)}"


def _is_noexec(path: str) -> bool:
    try:
        return bool(os.statvfs(path).f_flag & os.ST_NOEXEC)
    except OSError:
        return False
