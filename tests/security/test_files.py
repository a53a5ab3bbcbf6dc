"""Files that the daemon and its supervisors open, make and leave: nothing by a link, nothing for others to read."""

from __future__ import annotations

import os
import pwd
import shutil
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from attacks import as_user, open_folder, wait_for
from people import ANN, BOB, NEEDS_ROOT, SystemDaemon
from support import wait_until

from gpusched.engine.linux import as_user as identity

pytestmark = NEEDS_ROOT

KEPT = "what root wrote\n"


class Victim:
    """A folder of root's, with a file in it that nobody else may write, or see."""

    def __init__(self, daemon: SystemDaemon) -> None:
        self.folder = daemon.home / "roots"
        self.folder.mkdir(mode=0o755)
        self.file = self.folder / "out"
        self.file.write_text(KEPT)
        self.file.chmod(0o600)

    def is_whole(self) -> bool:
        """Whether nothing has come of the attack."""
        return self.file.read_text() == KEPT and sorted(os.listdir(self.folder)) == ["out"]


def through_a_link(open_to_all: Path, victim: Victim) -> dict[str, Any]:
    (open_to_all / "log").symlink_to(victim.file)
    return {"stdout": f"{open_to_all}/log"}


def errors_through_a_link(open_to_all: Path, victim: Victim) -> dict[str, Any]:
    (open_to_all / "log").symlink_to(victim.file)
    return {"stderr": f"{open_to_all}/log"}


def through_a_linked_folder(open_to_all: Path, victim: Victim) -> dict[str, Any]:
    (open_to_all / "folder").symlink_to(victim.folder)
    return {"stdout": f"{open_to_all}/folder/new"}


def through_a_linked_work_dir(open_to_all: Path, victim: Victim) -> dict[str, Any]:
    (open_to_all / "folder").symlink_to(victim.folder)
    return {"work_dir": f"{open_to_all}/folder", "stdout": "new"}


def by_its_own_name(open_to_all: Path, victim: Victim) -> dict[str, Any]:
    return {"stdout": str(victim.file)}


def up_and_over(open_to_all: Path, victim: Victim) -> dict[str, Any]:
    return {"work_dir": str(open_to_all), "stdout": "../roots/new"}


def into_the_spool(open_to_all: Path, victim: Victim) -> dict[str, Any]:
    return {"stdout": f"{open_to_all.parent}/var/lib/gpusched/spool/99.1.order"}


def into_the_kernel(open_to_all: Path, victim: Victim) -> dict[str, Any]:
    return {"stdout": "/proc/sys/kernel/core_pattern"}


def into_its_supervisor(open_to_all: Path, victim: Victim) -> dict[str, Any]:
    return {"stdout": "/proc/self/mem"}


def into_a_descriptor(open_to_all: Path, victim: Victim) -> dict[str, Any]:
    return {"stdout": "/proc/self/fd/1"}


def into_a_pipe(open_to_all: Path, victim: Victim) -> dict[str, Any]:
    os.mkfifo(open_to_all / "log", 0o666)
    return {"stdout": f"{open_to_all}/log"}


def into_a_device(open_to_all: Path, victim: Victim) -> dict[str, Any]:
    return {"stdout": "/dev/mem"}


ATTACKS: tuple[Callable[[Path, Victim], dict[str, Any]], ...] = (
    through_a_link,
    errors_through_a_link,
    through_a_linked_folder,
    through_a_linked_work_dir,
    by_its_own_name,
    up_and_over,
    into_the_spool,
    into_the_kernel,
    into_its_supervisor,
    into_a_descriptor,
    into_a_pipe,
    into_a_device,
)


def test_no_log_is_written_where_its_user_may_not(make: Any) -> None:
    daemon = make()
    victim, bob = Victim(daemon), daemon.person(BOB)
    for number, attack in enumerate(ATTACKS):
        for more in ({}, {"open_mode": "append"}, {"log_max_mib": 1}):
            folder = open_folder(daemon, f"open{number}-{len(more)}{'log_max_mib' in more}")
            spec = attack(folder, victim)
            job = bob.submit("/bin/sh", "-c", "echo mine; echo mine >&2", **{**spec, **more})
            told = wait_for(bob, job, "FAILED", "COMPLETED")
            assert told["state"] == "FAILED", (attack.__name__, more)
            assert "cannot write the" in told["reason_text"], (attack.__name__, told["reason_text"])
            assert victim.is_whole(), attack.__name__


def test_a_name_with_slashes_and_dots_cannot_escape(make: Any) -> None:
    daemon = make()
    victim, bob, folder = Victim(daemon), daemon.person(BOB), open_folder(daemon)
    for name in ("../roots/new", "..", "a/../../roots/new", "/etc/new", "%j/%x"):
        job = bob.submit("/bin/echo", "mine", name=name, work_dir=str(folder), stdout="log-%x")
        assert wait_for(bob, job, "COMPLETED", "FAILED")["state"] == "COMPLETED"
        assert (folder / f"log-{name.replace('/', '_')}").read_text() == "mine\n"
    values = ["../roots/new", "/etc/x"]
    job = bob.submit("/bin/echo", "mine", sweep=[f"x={','.join(values)}"], work_dir=str(folder), stdout="s-{x}")
    wait_for(bob, job, "COMPLETED")
    assert {path.name for path in folder.glob("s-*")} == {"s-.._roots_new", "s-_etc_x"}
    assert victim.is_whole()


@contextmanager
def swapping(place: Path, other: Path, target: Path) -> Iterator[None]:
    """Make a name lead to one thing and another, as fast as it goes."""
    stop = threading.Event()
    link = place.with_name("link")
    link.symlink_to(target)

    def put(source: Path) -> None:
        while True:
            try:
                os.rename(source, place)
                return
            except OSError:
                # A job whose log has no folder now has made it, as its user.
                shutil.rmtree(place, ignore_errors=True)

    def swap() -> None:
        spare = place.with_name("spare")
        while not stop.is_set():
            os.rename(place, spare)
            put(link)
            os.rename(place, link)
            put(spare)

    assert other.exists()
    thread = threading.Thread(target=swap)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def test_a_folder_replaced_by_a_link_cannot_redirect(make: Any) -> None:
    daemon = make()
    victim, bob, folder = Victim(daemon), daemon.person(BOB), open_folder(daemon)
    work = folder / "work"
    work.mkdir()
    work.chmod(0o777)
    held = bob.submit("/bin/echo", "mine", work_dir=str(work), stdout="out", hold=True)
    with swapping(work, folder, victim.folder):
        bob.call("POST", "/v1/jobs/release", {"ids": [held]})
        jobs = [bob.submit("/bin/echo", "mine", work_dir=str(work), stdout="out") for _ in range(15)]
        for job in (held, *jobs):
            wait_for(bob, job, "COMPLETED", "FAILED")
    assert victim.is_whole()


def test_a_rotated_file_cannot_redirect(make: Any) -> None:
    daemon = make()
    victim, bob, folder = Victim(daemon), daemon.person(BOB), open_folder(daemon)
    for number in (1, 2):
        (folder / f"log.old{number}").symlink_to(victim.file)
    big = "head -c 5000000 /dev/zero | tr '\\0' '\\n'"
    script = f"while :; do rm -f log; ln -s {victim.file} log; rm -f log; done & {big}; {big}; kill $!"
    job = bob.submit("/bin/sh", "-c", script, work_dir=str(folder), stdout="log", log_max_mib=1, log_keep=2)
    wait_for(bob, job, "COMPLETED", "FAILED")
    assert victim.is_whole()
    for path in folder.iterdir():
        assert path.is_symlink() or path.stat().st_uid == pwd.getpwnam(BOB).pw_uid


def test_a_supervisor_copies_output_as_the_user(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root's writing would pass a quota, and take the blocks that a file system keeps for root."""
    daemon = make()
    bob, folder = daemon.person(BOB), open_folder(daemon)
    read, write = os.pipe()
    seen: list[tuple[int, int]] = []
    real = os.write

    def noticed(fd: int, data: bytes) -> int:
        seen.append((os.geteuid(), fd))
        return real(fd, data)

    monkeypatch.setattr(os, "write", noticed)
    assert identity.write_as(pwd.getpwnam(BOB).pw_uid, write, b"x") == 1
    assert seen == [(pwd.getpwnam(BOB).pw_uid, write)]
    assert (os.geteuid(), os.getuid()) == (0, 0)
    os.close(write)
    os.close(read)
    monkeypatch.undo()
    # The file knows by whom it is not writable any more: the job goes on, and loses what does not fit.
    job = bob.submit("/bin/sh", "-c", "seq 1000000", stdout=f"{folder}/log", log_max_mib=1, log_keep=3)
    wait_for(bob, job, "COMPLETED")
    assert sum(path.stat().st_size for path in folder.glob("log*")) > 3_000_000


SAVES = 'echo saved > "$GPUSCHED_CHECKPOINT_DIR/state" && stat -c "%u %a" "$GPUSCHED_CHECKPOINT_DIR"; exit 3'


def test_no_other_process_enters_a_checkpoint_folder_before_its_job(make: Any) -> None:
    daemon = make()
    ann, base, folder = daemon.person(ANN), daemon.state_dir / "checkpoints", open_folder(daemon)
    for attempt in ("mkdir", "symlink", "rename"):

        def squat(attempt: str = attempt) -> None:
            if attempt == "mkdir":
                (base / "1").mkdir(mode=0o777)
            elif attempt == "symlink":
                (base / "1").symlink_to("/tmp")
            else:
                (base.parent / "checkpoints").rename(base.parent / "mine")

        with pytest.raises(AssertionError, match="PermissionError"):
            as_user(BOB, squat)
    for spec in ({}, {"gpus": 1}, {"retries": 1, "backoff_s": 0}):
        job = ann.submit("/bin/sh", "-c", SAVES, stdout=f"{folder}/log-%j", **spec)
        assert wait_for(ann, job, "FAILED")["exit_code"] == 3
        for log in folder.glob(f"log-{job}*"):
            assert log.read_text() == f"{ann.uid} 700\n"
        assert (base / job / "state").stat().st_uid == ann.uid
        for look in (lambda place: os.listdir(place), lambda place: (place / "state").write_text("evil")):
            with pytest.raises(AssertionError, match="PermissionError"):
                as_user(BOB, lambda look=look, place=base / job: look(place))
    with pytest.raises(AssertionError, match="PermissionError"):
        as_user(BOB, lambda: os.listdir(base))
    daemon.stop()
    daemon.configure("[life]\ncheckpoint_keep_s = 0\n")
    daemon.start()
    wait_until(lambda: not list(base.iterdir()), what="the folders to be taken away")


def test_a_planted_checkpoint_folder_is_not_used(make: Any) -> None:
    """As left by a release in which users could make folders there."""
    daemon = make()
    ann, bob, folder = daemon.person(ANN), daemon.person(BOB), open_folder(daemon)
    base, target = daemon.state_dir / "checkpoints", open_folder(daemon, "bobs")
    (base / "1").mkdir()
    os.chown(base / "1", bob.uid, -1)
    (base / "1").chmod(0o777)
    (base / "2").symlink_to(target)
    os.chown(base / "2", ann.uid, -1, follow_symlinks=False)
    (base / "3").write_text("")
    script = 'echo "<$GPUSCHED_CHECKPOINT_DIR>"'
    for number, why in (
        ("1", f"{base}/1 belongs to uid {bob.uid}"),
        ("2", f"cannot make {base}/2: Not a directory"),
        ("3", f"cannot make {base}/3: Not a directory"),
    ):
        job = ann.submit("/bin/sh", "-c", script, stdout=f"{folder}/log-%j")
        assert (job, wait_for(ann, job, "COMPLETED", "FAILED")["state"]) == (number, "COMPLETED")
        said = [f"gpusched: job {job} has no checkpoint folder: {why}", "<>"]
        assert (folder / f"log-{job}").read_text().splitlines() == said
    assert list(target.iterdir()) == []
    assert (base / "1").stat().st_uid == bob.uid


def test_later_runs_find_the_folder_of_the_first(make: Any) -> None:
    daemon = make()
    ann, folder = daemon.person(ANN), open_folder(daemon)
    script = 'cd "$GPUSCHED_CHECKPOINT_DIR" && touch run-$GPUSCHED_RESTART_COUNT && ls && test -e run-2'
    job = ann.submit("/bin/sh", "-c", script, stdout=f"{folder}/log", open_mode="append", retries=5, backoff_s=0)
    assert wait_for(ann, job, "COMPLETED", "FAILED")["state"] == "COMPLETED"
    assert (folder / "log").read_text().split() == ["run-0", *("run-0", "run-1"), *("run-0", "run-1", "run-2")]


def test_a_configured_folder_is_used_only_when_users_cannot_replace_its_content(make: Any) -> None:
    daemon = make()
    ann, bob, root = (daemon.person(user) for user in (ANN, BOB, "root"))
    folder, shared = open_folder(daemon), daemon.home / "scratch"
    shared.mkdir()
    shared.chmod(0o777)
    bobs = shared / "bobs"
    sticky = daemon.home / "sticky"
    sticky.mkdir()
    sticky.chmod(0o1777)
    as_user(BOB, lambda: (bobs.mkdir(), (sticky / "link").symlink_to(daemon.state_dir)))
    given = f"{ann.uid} 700\n"
    for number, (base, said) in enumerate(
        (
            (daemon.home / "made" / "for" / "it", given),
            (sticky, given),
            (sticky / "of-root", given),
            (shared, f"others can write {shared} (mode 777)"),
            (bobs, f"others can write {shared} (mode 777)"),
            (sticky / "link", f"{sticky}/link belongs to uid {bob.uid}"),
        )
    ):
        daemon.configure(f'[life]\ncheckpoint_dir = "{base}"\n')
        root.call("POST", "/v1/reload", {})
        job = ann.submit("/bin/sh", "-c", SAVES, stdout=f"{folder}/log{number}", retries=0)
        wait_for(ann, job, "FAILED")
        told = (folder / f"log{number}").read_text()
        (check,) = [one for one in root.call("GET", "/v1/doctor")["checks"] if one["check"] == "checkpoints"]
        assert (check["ok"], said in check["text"]) == (said == given, said != given)
        if said == given:
            assert told == given, base
            assert (base / job / "state").stat().st_uid == ann.uid
        else:
            assert told.startswith(f"gpusched: job {job} has no checkpoint folder: {said}\n"), base
    assert not list(bobs.iterdir())
    # Whoever is first in a folder where all may make some takes nothing over, and gains nothing by it.
    as_user(BOB, lambda: [(sticky / str(number)).mkdir(mode=0o777) for number in range(20, 40)])
    daemon.configure(f'[life]\ncheckpoint_dir = "{sticky}"\n')
    root.call("POST", "/v1/reload", {})
    for _ in range(20):
        ann.submit("/bin/true", hold=True)
    job = ann.submit("/bin/sh", "-c", 'echo "<$GPUSCHED_CHECKPOINT_DIR>"', stdout=f"{folder}/last")
    assert 20 <= int(job) < 40
    wait_for(ann, job, "COMPLETED")
    why = f"gpusched: job {job} has no checkpoint folder: {sticky}/{job} belongs to uid {bob.uid}"
    assert (folder / "last").read_text().splitlines() == [why, "<>"]


def test_root_creates_no_folder_behind_a_user_link(make: Any) -> None:
    daemon = make()
    ann, bob, root = (daemon.person(user) for user in (ANN, BOB, "root"))
    folder, sticky, private = open_folder(daemon), daemon.home / "sticky", daemon.home / "private"
    sticky.mkdir()
    sticky.chmod(0o1777)
    private.mkdir(mode=0o700)
    as_user(BOB, lambda: (sticky / "through").symlink_to(private))
    daemon.configure(f'[life]\ncheckpoint_dir = "{sticky}/through/for/jobs"\n')
    root.call("POST", "/v1/reload", {})
    job = ann.submit("/bin/sh", "-c", 'echo "<$GPUSCHED_CHECKPOINT_DIR>"', stdout=f"{folder}/log")
    wait_for(ann, job, "COMPLETED")
    why = f"gpusched: job {job} has no checkpoint folder: {sticky}/through belongs to uid {bob.uid}"
    assert (folder / "log").read_text().splitlines() == [why, "<>"]
    assert not list(private.iterdir())


def test_no_path_given_to_a_job_can_be_replaced_by_another_user(make: Any) -> None:
    daemon = make()
    ann, folder = daemon.person(ANN), open_folder(daemon)
    script = "#!/bin/sh\nenv; echo SCRIPT=$0\n"
    job = ann.submit(script=script, gpus=1, retries=1, stdout=f"{folder}/log")
    wait_for(ann, job, "COMPLETED")
    values = [value for _, _, value in (line.partition("=") for line in (folder / "log").read_text().splitlines())]
    given = {value for value in values if value.startswith(f"{daemon.home}/")}
    assert {Path(value).parent.name for value in given} >= {"spool", "checkpoints", "gpusched"}
    assert {Path(value).suffix for value in given} >= {".script", ".checkpoint", ".progress", ".sock"}
    for value in given:
        assert identity.why_unsafe(os.path.dirname(value), for_others=True) is None, value
        assert not os.stat(os.path.dirname(value)).st_mode & 0o022, value


def test_daemon_files_are_inaccessible_to_other_users(make: Any) -> None:
    daemon = make()
    ann = daemon.person(ANN)
    secret = {"PATH": "/usr/bin:/bin", "TOKEN": "hush-hush"}
    ann.submit(script="#!/bin/sh\n# hush-hush\nexec sleep 600\n", env=secret, gpus=1)
    ann.submit("/bin/sleep", "600", env=secret, interactive="pipes", keep=True)
    ann.submit("/bin/sleep", "600", env=secret, log_max_mib=1, stdout=f"{open_folder(daemon)}/log")
    daemon.person(BOB).refusal("POST", "/v1/shutdown", {})
    wait_until(lambda: list((daemon.state_dir / "spool").glob("*.attach")), what="the socket of the foreground")
    wait_until(lambda: list((daemon.state_dir / "spool").glob("*.script")), what="the script")
    places = [daemon.state_dir, daemon.socket.parent, *daemon.state_dir.rglob("*"), *daemon.socket.parent.rglob("*")]
    assert len(places) > 15

    def look() -> list[str]:
        found = []
        for place in places:
            for flags in (os.O_RDONLY, os.O_WRONLY, os.O_RDWR):
                try:
                    os.close(os.open(place, flags | os.O_NONBLOCK))
                except OSError:
                    continue
                found.append(str(place))
            try:
                (place / "new").write_text("")
            except OSError:
                continue
            found.append(f"{place}/new")
        return sorted(set(found))

    told = as_user(BOB, look)
    # The runtime folder holds the socket for all, and jobs of all run the Slurm commands.
    commands = [str(place) for place in places if "slurm" in place.relative_to(daemon.home).parts]
    assert told == sorted([str(daemon.socket.parent), *commands])
    for place in places:
        mode = place.lstat().st_mode
        if mode & 0o002 and place != daemon.socket:
            raise AssertionError(f"{place} is for everybody to write: {mode:o}")
    assert stat.S_IMODE((daemon.state_dir / "checkpoints").stat().st_mode) == 0o711
