"""Jobs in containers of the real podman, rootless, of a system's daemon; skipped with the reason if it cannot run."""

from __future__ import annotations

import io
import os
import pwd
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from harness import FINAL
from people import SystemDaemon
from support import wait_until

import gpusched
from gpusched.engine.linux.cgroup import is_unified
from gpusched.engine.linux.rootless import SUBORDINATE, has_range

BUSYBOX = "/bin/busybox"
IMAGE = "localhost/gpusched-test:1"
UNIFIED = ["unshare", "--mount", "sh", "-c", 'mount -t cgroup2 none /sys/fs/cgroup && exec "$@"', "sh"]
"""Where both versions of control groups are mounted, crun runs in a mount namespace with version 2 alone."""


def own_user() -> str | None:
    """An account that may map ids, and has a home."""
    for found in pwd.getpwall():
        has_ids = all(has_range(path, found.pw_name, found.pw_uid) for path in SUBORDINATE)
        if found.pw_uid >= 1000 and os.path.isdir(found.pw_dir) and has_ids:
            return found.pw_name
    return None


def prefix() -> list[str]:
    return [] if is_unified() else UNIFIED


def why_not() -> str | None:
    if os.geteuid() != 0:
        return "needs root, to run jobs as another user"
    for program in ("podman", "crun", "newuidmap", "catatonit"):
        if shutil.which(program) is None:
            return f"{program} is not installed"
    if not os.path.exists(BUSYBOX):
        return f"there is no {BUSYBOX} to make an image of"
    if own_user() is None:
        return f"no account has a home and ids in {' and '.join(SUBORDINATE)}"
    tried = subprocess.run([*prefix(), "true"], capture_output=True, text=True, check=False)
    return None if tried.returncode == 0 else f"no mount namespace: {tried.stderr.strip()}"


WHY_NOT = why_not()
pytestmark = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))


class RealPodman:
    """A system's daemon, and a user with an image of busybox."""

    def __init__(self) -> None:
        user = own_user()
        assert user is not None
        self.account = pwd.getpwnam(user)
        self.daemon = SystemDaemon()
        self.daemon.prefix = prefix()
        self.daemon.start()
        self.person = self.daemon.person(user)
        self.folder = Path(self.daemon.home) / "work"
        self.folder.mkdir()
        os.chown(self.folder, self.account.pw_uid, self.account.pw_gid)

    def podman(self, *words: str, stdin: bytes = b"") -> str:
        command = ["podman", "--cgroup-manager=cgroupfs", *words]
        env = {"PATH": os.environ["PATH"], "HOME": self.account.pw_dir}
        done = subprocess.run(
            [
                *prefix(),
                "setpriv",
                f"--reuid={self.account.pw_uid}",
                f"--regid={self.account.pw_gid}",
                "--clear-groups",
                *command,
            ],
            input=stdin,
            capture_output=True,
            env=env,
            cwd="/",
            check=False,
        )
        return (done.stdout + done.stderr).decode()

    def submit(self, text: str, **spec: Any) -> str:
        env = {"PATH": "/usr/bin:/bin", "HOME": self.account.pw_dir, "A": "1 2", "M": "one\ntwo", **spec.pop("env", {})}
        return self.person.submit(
            *("sh", "-c", text), image=IMAGE, env=env, work_dir=str(self.folder), stdout="out-%j", **{"gpus": 1, **spec}
        )

    def python(self, code: str, *words: str) -> subprocess.Popen[str]:
        """Python as the user, for whom the tests' own interpreter may be out of reach."""
        env = {"PATH": "/usr/bin:/bin", "HOME": self.account.pw_dir, "GPUSCHED_SOCKET": str(self.daemon.socket)}
        env["PYTHONPATH"] = str(Path(gpusched.__file__).parent.parent)
        for python in (sys.executable, "/usr/bin/python3"):
            try:
                return subprocess.Popen(
                    [python, "-c", code, *words],
                    env=env,
                    user=self.account.pw_uid,
                    group=self.account.pw_gid,
                    extra_groups=[],
                    cwd=self.folder,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            except (PermissionError, FileNotFoundError):
                continue
        pytest.skip(f"no Python that {self.account.pw_name} may run")

    def job(self, job_id: str) -> dict[str, Any]:
        found: dict[str, Any] = self.person.call("GET", f"/v1/jobs/{job_id}")["job"]
        return found

    def until(self, job_id: str) -> dict[str, Any]:
        wait_until(lambda: self.job(job_id)["state"] in FINAL, what=f"job {job_id}")
        return self.job(job_id)

    def output(self, job_id: str) -> str:
        path = self.folder / f"out-{job_id}"
        return path.read_text() if path.exists() else ""

    def processes(self, job_id: str) -> str:
        """States and commands of podman's processes for this job."""
        listed = subprocess.run(["ps", "-wweo", "pid,stat,args"], capture_output=True, text=True, check=True).stdout
        found = [line for line in listed.splitlines() if f"--name=gpusched-{job_id}." in line]
        return "\n".join(f" {line.split()[1][0]} {line}" for line in found)

    def containers(self) -> str:
        return self.podman("ps", "--all", "--quiet", "--filter", "label=gpusched")


def runs(command: str) -> bool:
    """Whether any process on this machine has exactly this command line."""
    listed = subprocess.run(["ps", "-wweo", "args"], capture_output=True, text=True, check=True).stdout
    return command in listed.splitlines()


@pytest.fixture(scope="module")
def lab() -> Iterator[RealPodman]:
    made = RealPodman()
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        tar.add(BUSYBOX, "bin/busybox")
        for name in ("sh", "id", "sleep", "cat"):
            link = tarfile.TarInfo(f"bin/{name}")
            link.type, link.linkname = tarfile.SYMTYPE, "busybox"
            tar.addfile(link)
        for name in ("tmp", "etc", "proc"):
            folder = tarfile.TarInfo(name)
            folder.type, folder.mode = tarfile.DIRTYPE, 0o755
            tar.addfile(folder)
    made.podman("import", "-", IMAGE, stdin=archive.getvalue())
    yield made
    made.podman("rmi", "--force", IMAGE)
    made.daemon.close()


def test_the_job_is_its_user_in_its_folder_and_leaves_nothing(lab: RealPodman) -> None:
    job = lab.submit('id -u; pwd; echo "$A$M$GPUSCHED_JOB_ID"; echo err >&2; echo x > made; exit 7')
    assert (lab.until(job)["state"], lab.job(job)["exit_code"]) == ("FAILED", 7)
    assert lab.output(job) == f"{lab.account.pw_uid}\n{lab.folder}\n1 2one\ntwo{job}\nerr\n"
    assert (lab.folder / "made").stat().st_uid == lab.account.pw_uid
    assert lab.job(job)["spec"]["launch"]["image_digest"].startswith("localhost/gpusched-test@sha256:")
    assert lab.containers() == ""


def test_a_cancelled_job_may_save_its_work_and_is_gone(lab: RealPodman) -> None:
    job = lab.submit('trap "echo saved; exit 0" TERM; echo up; while :; do sleep 0.1; done')
    wait_until(lambda: "up" in lab.output(job), what="the container")
    assert lab.containers() != ""
    lab.person.call("POST", "/v1/jobs/cancel", {"ids": [job]})
    assert lab.until(job)["state"] == "CANCELLED"
    assert "saved" in lab.output(job)
    assert lab.containers() == ""


def test_a_job_that_ignores_signals_is_killed_with_its_container(lab: RealPodman) -> None:
    job = lab.submit('trap "" TERM; sleep 600 & echo up; while :; do sleep 0.1; done', grace_s=0.5)
    wait_until(lambda: "up" in lab.output(job), what="the container")
    lab.person.call("POST", "/v1/jobs/cancel", {"ids": [job]})
    lab.until(job)
    assert lab.containers() == ""
    left = subprocess.run(
        ["pgrep", "-u", str(lab.account.pw_uid), "sleep"], capture_output=True, text=True, check=False
    )
    assert left.stdout == ""


def test_a_suspended_container_goes_on(lab: RealPodman) -> None:
    job = lab.submit("echo up; while [ ! -e go ]; do sleep 0.1; done; echo gone on; exit 3")
    wait_until(lambda: "up" in lab.output(job), what="the container")
    lab.person.call("POST", "/v1/jobs/suspend", {"ids": [job]})
    wait_until(lambda: " T " in lab.processes(job), what="stopped processes")
    (lab.folder / "go").touch()
    lab.person.call("POST", "/v1/jobs/resume", {"ids": [job]})
    assert (lab.until(job)["exit_code"], lab.containers()) == (3, "")
    (lab.folder / "go").unlink()


def test_no_image_no_gpu(lab: RealPodman) -> None:
    body = {"argv": ["true"], "image": "localhost/none-such:1", "gpus": 1, "work_dir": str(lab.folder), "cpus": 0}
    job = str(lab.person.call("POST", "/v1/jobs", {"spec": {"env": {"HOME": lab.account.pw_dir}, **body}})["job"]["id"])
    lab.person.call("POST", "/v1/jobs/update", {"ids": [str(int(job) - 1)], "changes": {"retries": 0}})
    ended = lab.until(job)
    assert (ended["reason"], ended["start_at"]) == ("ImagePullFailed", None)
    assert "image not known" in ended["reason_text"]


def test_each_rank_has_its_container_and_a_command_from_outside_enters_the_first(lab: RealPodman) -> None:
    text = 'echo "$RANK $WORLD_SIZE $SLURM_PROCID $M"; while :; do sleep 0.1; done'
    job = lab.submit(text, ntasks=2)
    wait_until(lambda: lab.output(job).count("two") == 2, what="both ranks")
    assert sorted(lab.output(job).splitlines()) == ["0 2 0 one", "1 2 1 one", "two", "two"]
    assert len(lab.containers().split()) == 2
    code = "import sys; sys.argv[0] = 'grun'; from gpusched.cli.grun import main; sys.exit(main())"
    text = 'cat /proc/1/comm; echo "$RANK $A"; id -u; exit 6'
    client = lab.python(code, "--job", job, "-E", "A=7 8", "sh", "-c", text)
    output, errors = client.communicate()
    first, *rest = output.splitlines()
    assert (rest, client.returncode) == (["0 7 8", str(lab.account.pw_uid)], 6), errors
    assert first in ("catatonit", "podman-init")
    client = lab.python(code, "--job", job, "sleep", "4711")
    wait_until(lambda: runs("sleep 4711"), what="the command in the container")
    client.kill()
    client.communicate()
    wait_until(lambda: not runs("sleep 4711"), what="its end")
    assert lab.job(job)["state"] == "RUNNING"
    client = lab.python(code, "--job", job, "sleep", "4712")
    wait_until(lambda: runs("sleep 4712"), what="the command in the container")
    lab.person.call("POST", "/v1/jobs/cancel", {"ids": [job]})
    assert lab.until(job)["state"] == "CANCELLED"
    assert lab.containers() == ""
    client.communicate()
    assert not runs("sleep 4712")
