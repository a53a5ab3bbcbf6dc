"""Jobs of another user under a root engine: accounts that go, homes that root may not enter, limits, environments."""

from __future__ import annotations

import os
import pwd
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from engine_bench import FOREVER, Does, LocalBench
from people import NEEDS_ROOT, SystemDaemon
from support import wait_until

from gpusched.engine.linux import pam
from gpusched.engine.linux.as_user import LaunchError
from gpusched.engine.supervisor import launch
from gpusched.model.execution import RankLaunch, RunStarted, StopOrder

pytestmark = NEEDS_ROOT

SLEEPS = Does(lasts_s=FOREVER)
THROWN_AWAY = f"gpusched-{os.getpid()}"
UID = 61_000 + os.getpid() % 1000
"""Far from those of real people and of the system; another one in each process that runs tests."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """One that everybody may enter."""
    found = Path(os.path.realpath(tmp_path))
    for parent in (found, *found.parents):
        if parent.stat().st_uid == os.geteuid() and not parent.stat().st_mode & 0o001:
            parent.chmod(parent.stat().st_mode | 0o011)
    return found


@pytest.fixture
def bench(folder: Path) -> Iterator[LocalBench]:
    made = LocalBench(folder)
    yield made
    made.close()


@pytest.fixture
def home(folder: Path) -> Path:
    """Of nobody, and closed to everybody else."""
    made = folder / "home"
    made.mkdir(mode=0o700)
    os.chown(made, 65534, 65534)
    return made


def test_log_folders_are_created_as_the_user(bench: LocalBench, home: Path) -> None:
    bench.start("1.1", argv=("true",), stdout_path="logs/1.out", **nobody(home))
    assert bench.end_of("1.1").exit_code == 0
    assert (home / "logs").stat().st_uid == 65534
    assert (home / "logs" / "1.out").stat().st_uid == 65534


def test_no_log_folder_is_created_where_the_user_may_not(bench: LocalBench, home: Path, folder: Path) -> None:
    closed = folder / "closed"
    closed.mkdir(mode=0o755)
    # A link to where only root may write, in a folder of the user's.
    (home / "logs").symlink_to(closed)
    for run, path in (("1.1", f"{closed}/new/1.out"), ("2.1", "logs/new/1.out")):
        bench.start(run, argv=("true",), stdout_path=path, **nobody(home))
        error = bench.end_of(run).launch_error
        assert error is not None
        assert error.endswith("for the output: Permission denied"), error
    assert list(closed.iterdir()) == []


def test_output_that_the_user_cannot_write_is_kept_for_that_user_alone(
    bench: LocalBench, home: Path, folder: Path
) -> None:
    outputs, closed = folder / "outputs", folder / "closed"
    closed.mkdir(mode=0o755)
    where = {"outputs": str(outputs), "node": "n2", **nobody(home)}
    line = "echo hello; echo oops >/dev/stderr"
    bench.start("1.1", argv=("sh", "-c", line), stdout_path=f"{closed}/1.out", stderr_path="err", **where)
    kept = outputs / "1.1"
    end = bench.end_of("1.1")
    assert end.exit_code == 0
    assert end.moved == f"cannot write the output to {closed}/1.out: Permission denied; it is kept in {kept} on n2"
    file = Path(f"{kept}{closed}/1.out")
    assert (file.read_text(), file.stat().st_uid, (home / "err").read_text()) == ("hello\n", 65534, "oops\n")
    assert (kept.stat().st_uid, kept.stat().st_mode & 0o777, outputs.stat().st_uid) == (65534, 0o700, 0)
    assert outputs.stat().st_mode & 0o777 == 0o711
    assert list(closed.iterdir()) == []


def test_no_output_is_kept_in_a_folder_of_somebody_else(bench: LocalBench, home: Path, folder: Path) -> None:
    outputs = folder / "outputs"
    (outputs / "1.1").mkdir(parents=True)
    os.chown(outputs / "1.1", UID, UID)
    target = folder / "target"
    target.mkdir()
    (outputs / "2.1").symlink_to(target)
    for run in ("1.1", "2.1"):
        given = {"stdout_path": "/root/none/1.out", "outputs": str(outputs), "node": "n2", **nobody(home)}
        bench.start(run, argv=("true",), **given)
        error = str(bench.end_of(run).launch_error)
        assert error.startswith("cannot write the output to /root/none/1.out: Permission denied; "), error
    assert not list((outputs / "1.1").iterdir())
    assert not list(target.iterdir())


def test_the_input_is_opened_as_the_user_and_the_task_knows_its_own_pid(
    bench: LocalBench, home: Path, folder: Path
) -> None:
    (home / "in.txt").write_text("hers\n")
    (folder / "secret").write_text("of root\n")
    (folder / "secret").chmod(0o600)
    (home / "link").symlink_to(folder / "secret")
    text = 'cat; [ "$SLURM_TASK_PID" = $$ ] && echo $SLURM_JOB_GID'
    env = {"PATH": "/usr/bin:/bin", "SLURM_JOB_ID": "1"}
    given = {**nobody(home), "env": env}
    bench.start("1.1", argv=("sh", "-c", text), stdin_path=str(home / "in.txt"), stdout_path="out", **given)
    assert bench.end_of("1.1").exit_code == 0
    assert (home / "out").read_text().split() == ["hers", "65534"]
    bench.start("2.1", argv=("cat",), stdin_path=str(home / "link"), **given)
    error = bench.end_of("2.1").launch_error
    assert error == f"cannot read the input from {home}/link: Permission denied"


def test_every_rank_is_a_process_of_the_user_with_files_of_the_user(
    bench: LocalBench, home: Path, folder: Path
) -> None:
    closed = folder / "closed"
    closed.mkdir(mode=0o755)
    given = {**nobody(home), "env": {"PATH": "/usr/bin:/bin", "SLURM_JOB_ID": "1"}, "stdout_path": "0.out"}

    def rank(number: int, path: str) -> RankLaunch:
        return RankLaunch({"RANK": str(number)}, number, path, None, None)

    text = 'echo $RANK $(id -u); [ "$SLURM_TASK_PID" = $$ ]'
    bench.start("1.1", argv=("sh", "-c", text), ranks=(rank(0, "0.out"), rank(1, "1.out")), **given)
    end = bench.end_of("1.1")
    assert (end.exit_code, end.rank) == (0, None)
    for number in (0, 1):
        assert (home / f"{number}.out").read_text() == f"{number} 65534\n"
        assert (home / f"{number}.out").stat().st_uid == 65534
    bench.start("2.1", argv=("sleep", "600"), ranks=(rank(0, "0.out"), rank(1, f"{closed}/1.out")), **given)
    error = bench.end_of("2.1").launch_error
    assert error == f"cannot write the output to {closed}/1.out: Permission denied"


@pytest.fixture
def user() -> Iterator[str]:
    """An account that is there for this test."""
    if shutil.which("useradd") is None:
        pytest.skip("there is no useradd")
    add = ["useradd", "--no-create-home", "--uid", str(UID), "--shell", "/bin/sh", THROWN_AWAY]
    # Another one may have locked the list of accounts for a moment.
    wait_until(lambda: subprocess.run(add, check=False, capture_output=True).returncode == 0, what="the account")
    yield THROWN_AWAY
    # For the same reason; the next test of this process makes it anew.
    take_away(THROWN_AWAY)


def take_away(user: str) -> None:
    """Remove the account, also while processes of it run."""
    remove = ["userdel", "--force", user]

    def is_gone() -> bool:
        subprocess.run(remove, check=False, capture_output=True)
        return user not in {entry.pw_name for entry in pwd.getpwall()}

    wait_until(is_gone, what=f"{user} to go")


def nobody(home: Path) -> dict[str, object]:
    return {"uid": 65534, "user": "nobody", "work_dir": str(home)}


# --- homes of other machines -------------------------------------------------------------------------------


@pytest.fixture
def squashed_bench(folder: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalBench]:
    """One whose root is an ordinary user to other people's files, as on a disk of another machine."""
    if shutil.which("setpriv") is None:
        pytest.skip("there is no setpriv")
    wrapper = folder / "python"
    words = f"setpriv --bounding-set=-dac_override,-dac_read_search -- {sys.executable}"
    wrapper.write_text(f'#!/bin/sh\nexec {words} "$@"\n')
    wrapper.chmod(0o755)
    looks = [str(wrapper), "-I", "-S", "-c", f"import os; os.listdir({str(home)!r})"]
    if "PermissionError" not in subprocess.run(looks, check=False, capture_output=True, text=True).stderr:
        pytest.skip("root may enter all folders here, whatever it gives up")
    monkeypatch.setattr("gpusched.engine.launchers.sys.executable", str(wrapper))
    made = LocalBench(folder)
    monkeypatch.undo()
    yield made
    made.close()


def test_a_home_closed_to_root_is_supported(squashed_bench: LocalBench, home: Path) -> None:
    bench = squashed_bench
    program = home / "program"
    program.write_text("#!/bin/sh\necho from the program; pwd; exit 6\n")
    program.chmod(0o700)
    os.chown(program, 65534, 65534)
    bench.start("1.1", script=b"#!/bin/sh\nid -u; ls; exec ./program\n", argv=(), umask=0o077, **nobody(home))
    bench.start("2.1", argv=("./program",), stderr_path="2.1.err", **nobody(home))
    bench.start("3.1", argv=("./missing",), **nobody(home))
    assert bench.end_of("1.1").exit_code == 6
    assert bench.end_of("2.1").exit_code == 6
    words = (home / "1.1.out").read_text().split("\n")
    assert words[0] == "65534"
    assert words[-3:] == ["from the program", str(home), ""]
    assert (home / "1.1.out").stat().st_mode & 0o777 == 0o600
    assert "./missing" in str(bench.end_of("3.1").launch_error)


def test_out_of_memory_is_recognized_in_output_that_root_cannot_read(squashed_bench: LocalBench, home: Path) -> None:
    text = "echo torch.OutOfMemoryError: CUDA out of memory; exit 1"
    squashed_bench.start("1.1", argv=("sh", "-c", text), has_gpus=True, umask=0o077, **nobody(home))
    assert squashed_bench.end_of("1.1").gpu_oom


def test_output_is_rotated_where_root_may_not_enter(squashed_bench: LocalBench, home: Path) -> None:
    text = "head -c 3000000 /dev/zero | tr '\\0' x | fold -w 99; echo last > /dev/stderr"
    squashed_bench.start("1.1", argv=("sh", "-c", text), log_max_mib=1, log_keep=2, umask=0o077, **nobody(home))
    assert squashed_bench.end_of("1.1").exit_code == 0
    names = sorted(path.name for path in home.iterdir())
    assert names == ["1.1.out", "1.1.out.old1", "1.1.out.old2"]
    assert {path.stat().st_uid for path in home.iterdir()} == {65534}
    assert (home / "1.1.out").read_text().endswith("last\n")


# --- accounts that go -----------------------------------------------------------------------------------------


def test_a_job_of_a_deleted_account_is_not_started(bench: LocalBench, user: str) -> None:
    take_away(user)
    bench.start("1.1", uid=UID, user=user, work_dir="/tmp", stdout_path="/dev/null")
    error = str(bench.end_of("1.1").launch_error)
    assert error == f"cannot start as user {user}: this machine has no account with uid {UID}"


def test_a_reused_uid_does_not_get_the_job(bench: LocalBench, user: str) -> None:
    bench.start("1.1", uid=UID, user="her-before", work_dir="/tmp", stdout_path="/dev/null")
    error = str(bench.end_of("1.1").launch_error)
    assert error == f"cannot start as user her-before: uid {UID} now belongs to account {user}"


def test_a_job_whose_account_is_deleted_ends_normally(bench: LocalBench, user: str) -> None:
    bench.start("1.1", SLEEPS, uid=UID, user=user, work_dir="/tmp", stdout_path="/dev/null")
    bench.until("1.1", RunStarted)
    take_away(user)
    bench.engine.order("1.1", StopOrder("cancel"))
    assert bench.end_of("1.1").stopped_by == "cancel"


def test_a_daemon_outlives_the_accounts_of_its_jobs(user: str) -> None:
    daemon = SystemDaemon()
    try:
        daemon.start()
        person = daemon.person(user)
        waiting = person.submit("true", retries=3, hold=True)
        running = person.submit("sleep", "600")
        root = daemon.person("root")
        wait_until(lambda: root.call("GET", f"/v1/jobs/{running}")["job"]["state"] == "RUNNING", what="the job to run")
        take_away(user)
        root.call("POST", "/v1/jobs/release", {"ids": [waiting]})
        wait_until(lambda: root.call("GET", f"/v1/jobs/{waiting}")["job"]["state"] == "FAILED", what="the job to fail")
        job = root.call("GET", f"/v1/jobs/{waiting}")["job"]
        assert (job["reason"], job["user"]) == ("JobLaunchFailure", user)
        assert job["reason_text"].endswith(f"no account with uid {UID}")
        assert job["run"] == 1, "tried once only"
        for command, job in (("gq", running), ("gshow", waiting), ("ghist", waiting)):
            program = f"from gpusched.cli.{command} import main; main()"
            words = [sys.executable, "-c", program, *([job] if command == "gshow" else ["-u", user])]
            env = {**os.environ, "GPUSCHED_SOCKET": str(daemon.socket)}
            shown = subprocess.run(words, env=env, check=False, capture_output=True, text=True)
            assert shown.returncode == 0, shown.stderr
            # The name it had: a number means less to people, and may be somebody else's by now.
            assert user in shown.stdout
            assert job in shown.stdout
        root.call("POST", "/v1/jobs/cancel", {"ids": [running]})
        wait_until(lambda: root.call("GET", f"/v1/jobs/{running}")["job"]["state"] == "CANCELLED", what="its end")
    finally:
        daemon.close()


# --- what a job is born with ---------------------------------------------------------------------------------


def environment(bench: LocalBench, run: str) -> dict[str, str]:
    end = bench.end_of(run)
    assert end.exit_code == 0, end
    return dict(line.split("=", 1) for line in bench.output(run).splitlines())


def test_an_environment_without_home_gets_the_accounts(bench: LocalBench, folder: Path) -> None:
    folder.chmod(0o777)
    games = pwd.getpwnam("games")
    bench.start("1.1", argv=("env",), env={}, uid=games.pw_uid, user="games")
    found = environment(bench, "1.1")
    assert {name: found[name] for name in ("HOME", "USER", "LOGNAME", "SHELL", "PATH")} == {
        "HOME": games.pw_dir,
        "USER": "games",
        "LOGNAME": "games",
        "SHELL": games.pw_shell,
        "PATH": launch.DEFAULT_PATH,
    }
    bench.start("2.1", argv=("env",), env={"HOME": "/elsewhere", "PATH": "/bin"}, uid=games.pw_uid, user="games")
    found = environment(bench, "2.1")
    assert (found["HOME"], found["PATH"], found["USER"]) == ("/elsewhere", "/bin", "games")


def test_a_login_runtime_folder_is_not_passed_on(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    login = {"XDG_RUNTIME_DIR": "/run/user/61998", "DBUS_SESSION_BUS_ADDRESS": "unix:path=/run/user/61998/bus"}
    env = {"HOME": "/", "USER": "a", "LOGNAME": "a", "SHELL": "/bin/sh", **login}
    launch.complete(env, 61998, foreign=True)
    assert not env.keys() & login.keys()
    own = folder / "own"
    own.mkdir()
    os.chown(own, 65534, 65534)
    for uid, is_kept in ((65534, True), (1, False)):
        env = {"XDG_RUNTIME_DIR": str(own), "DBUS_SESSION_BUS_ADDRESS": "unix:path=/elsewhere"}
        launch.complete(env, uid, foreign=True)
        assert ("XDG_RUNTIME_DIR" in env) == is_kept
        assert env["DBUS_SESSION_BUS_ADDRESS"] == "unix:path=/elsewhere"


# --- limits.conf --------------------------------------------------------------------------------------------


def limits_after_session(user: str, folder: Path) -> tuple[str, int]:
    """What a session says and leaves behind, in a process of its own."""
    told, tell = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            pam.open_session(user, str(folder))
            words = ""
        except LaunchError as error:
            words = str(error)
        except BaseException as error:
            words = repr(error)
        os.write(tell, f"{resource.getrlimit(resource.RLIMIT_NOFILE)[1]} {words}".encode())
        os._exit(0)
    os.close(tell)
    with os.fdopen(told) as file:
        number, _, words = file.read().partition(" ")
    os.waitpid(child, 0)
    return words, int(number)


@pytest.fixture
def pam_folder(folder: Path) -> Path:
    try:
        has_library = hasattr(pam.ctypes.CDLL(pam.LIBRARY), "pam_start_confdir")
    except OSError:
        has_library = False
    if not has_library:
        pytest.skip("this machine has no PAM, or one that knows only /etc/pam.d")
    made = folder / "pam.d"
    made.mkdir()
    return made


def test_a_session_sets_the_limits_of_its_user(pam_folder: Path) -> None:
    limits = pam_folder / "limits.conf"
    limits.write_text("games hard nofile 321\nnobody hard nofile 123\n")
    (pam_folder / pam.SERVICE).write_text(f"session required pam_limits.so conf={limits}\n")
    assert limits_after_session("games", pam_folder) == ("", 321)
    assert limits_after_session("nobody", pam_folder) == ("", 123)


def test_a_refused_session_is_reported_in_a_sentence(pam_folder: Path) -> None:
    (pam_folder / pam.SERVICE).write_text("session required pam_deny.so\n")
    words, _ = limits_after_session("games", pam_folder)
    assert words.startswith("cannot set the limits of user games: ")
    assert words.endswith("(see /etc/pam.d/gpusched and /etc/security/limits.conf)")


def test_the_installed_file_is_the_one_read() -> None:
    text = Path(__file__).parents[2].joinpath("systemd", "pam.d-gpusched").read_text()
    lines = [line.split() for line in text.splitlines() if line and not line.startswith("#")]
    assert lines == [["session", "required", "pam_limits.so"]]
