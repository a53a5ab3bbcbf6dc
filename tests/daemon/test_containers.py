"""Jobs in containers: the pull before a GPU, the pinned image, refusals, kills; programs stand in for runtimes."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_bench import LocalBench
from harness import FINAL, Daemon
from stand_in_runtimes import DIGEST, StandIns
from support import wait_until

from gpusched.daemon.failures import STEPS, VARIABLE
from gpusched.engine.container import container_name
from gpusched.errors import DaemonUnreachable, GpuschedError
from gpusched.model.execution import ContainerLaunch, RankLaunch, RunEnded, RunLost, RunStarted, StopOrder
from gpusched.model.value import replace

IMAGE = "docker.io/library/alpine:3"


class Box(Daemon):
    """A daemon whose jobs run in containers of the stand-in for apptainer."""

    def __init__(self, home: Path) -> None:
        super().__init__(
            home, fake_gpus="2x24GiB", config='[containers]\nruntime = "apptainer"\n[daemon]\npoll_s = 0.2\n'
        )
        self.runtimes = StandIns(home / "bin")
        self.env["PATH"] = f"{home}/bin:{os.environ['PATH']}"
        self.env["HOME"] = str(home)

    def box(self, *argv: str, **spec: Any) -> str:
        """Submit a job in a container with one GPU."""
        env = {"PATH": os.environ["PATH"], "HOME": str(self.home), **spec.pop("env", {})}
        return self.submit(*argv, **{"image": IMAGE, "gpus": 1, "env": env, **spec})

    def job(self, job_id: object) -> dict[str, Any]:
        found: dict[str, Any] = self.call("GET", f"/v1/jobs/{job_id}")["job"]
        return found

    def until(self, job_id: object, *states: str) -> dict[str, Any]:
        wait_until(lambda: self.job(job_id)["state"] in (states or FINAL), what=f"job {job_id}")
        return self.job(job_id)

    def reason(self, job_id: object) -> str:
        return str(self.job(job_id)["reason"])

    def pull_of(self, job_id: str) -> str:
        """The job that pulls its image: submitted just before it."""
        return str(int(job_id) - 1)

    def refusal(self, **spec: Any) -> GpuschedError:
        with pytest.raises(GpuschedError) as caught:
            self.box("true", **spec)
        return caught.value


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Box]:
    made = Box(tmp_path_factory.mktemp("boxes") / "home")
    made.start()
    yield made
    made.close()


def test_a_job_runs_in_its_image_with_its_environment_folder_and_exit_code(lab: Box) -> None:
    text = 'echo "$CONTAINER_IMAGE"; pwd; echo "$A"; echo "$CUDA_VISIBLE_DEVICES"; exit 3'
    job = lab.box("sh", "-c", text, env={"A": "it's\ntwo"}, container_workdir="/", binds=["/tmp:/data:ro"])
    ended = lab.until(job)
    assert (ended["state"], ended["exit_code"]) == ("FAILED", 3)
    call = next(call for call in lab.runtimes.calls() if " exec " in f" {call} ")
    image, folder, *value, gpu = (lab.home / f"gpusched-{job}.out").read_text().splitlines()
    assert (folder, value) == ("/", ["it's", "two"])
    assert gpu.startswith("GPU-")
    assert image.startswith(f"{lab.home}/.cache/gpusched/images/")
    assert image.endswith(".sif")
    for word in ("--contain", "--bind=/tmp:/data:ro", f"--bind={lab.home}:{lab.home}", "--pwd=/", image):
        assert word in call.split(), (word, call)
    spec = lab.call("GET", f"/v1/jobs/{job}")["job"]["spec"]["launch"]
    assert (spec["image"], spec["image_digest"]) == (IMAGE, image)
    assert lab.until(lab.pull_of(job))["state"] == "COMPLETED"
    assert not list(lab.home.glob("gpusched-pull-*"))


def test_no_gpu_is_taken_while_the_image_is_pulled_and_jobs_share_the_pull(lab: Box) -> None:
    lab.runtimes.be_slow()
    first = lab.box("true")
    pull = lab.pull_of(first)
    lab.pid_of(pull)  # and not only recorded as running: nothing would be left of it after the kill
    second = lab.box("true", array="0-1")
    assert (lab.job(first)["state"], lab.reason(first), lab.reason(second)) == ("PENDING", "ImagePull", "ImagePull")
    assert f"job {pull}" in lab.job(first)["reason_text"]
    assert int(second) == int(first) + 1
    plain = lab.submit("true", gpus=2)
    assert lab.until(plain)["state"] == "COMPLETED"
    assert lab.job(pull)["gpus"] == []
    lab.kill()
    lab.start()
    assert (lab.job(pull)["state"], lab.reason(first)) == ("RUNNING", "ImagePull")
    lab.call("POST", "/v1/jobs/cancel", {"ids": [pull]})
    for job in (first, second):
        ended = lab.until(job)
        assert (ended["state"], ended["reason"]) == ("CANCELLED", "ImagePullFailed")
        assert "cancelled by" in ended["reason_text"]
    lab.runtimes.be_slow(False)


def test_a_pull_that_no_job_waits_for_any_more_is_cancelled(lab: Box) -> None:
    lab.runtimes.be_slow()
    first, second = lab.box("true"), lab.box("true")
    pull = lab.pull_of(first)
    lab.until(pull, "RUNNING")
    lab.call("POST", "/v1/jobs/cancel", {"ids": [first]})
    assert (lab.job(second)["state"], lab.job(pull)["state"]) == ("PENDING", "RUNNING")
    lab.call("POST", "/v1/jobs/cancel", {"ids": [second]})
    ended = lab.until(pull)
    lab.runtimes.be_slow(False)
    assert (ended["state"], ended["reason_text"]) == ("CANCELLED", f"cancelled by root with job {second}")
    spec = lab.spec("true", image=IMAGE, gpus=1, env={"HOME": str(lab.home)})
    found = lab.call("POST", "/v1/jobs", {"spec": spec, "dry_run": True})["dry_run"]
    assert found["text"] == "would start now on {}, GPU 0; its image is pulled first".format(found["node"])


def test_a_pull_that_fails_says_what_the_runtime_said_and_what_to_type(lab: Box) -> None:
    job = lab.box("true", image="docker.io/library/none-such:1")
    lab.call("POST", "/v1/jobs/update", {"ids": [lab.pull_of(job)], "changes": {"retries": 0}})
    ended = lab.until(job)
    assert (ended["state"], ended["reason"]) == ("CANCELLED", "ImagePullFailed")
    assert "While making image: manifest unknown" in ended["reason_text"]
    assert ended["reason_text"].endswith("; try: apptainer pull docker://docker.io/library/none-such:1")
    assert (lab.home / f"gpusched-pull-{lab.pull_of(job)}.out").exists()


def test_a_requeued_job_uses_the_same_image_and_a_kill_reaches_into_it(lab: Box) -> None:
    job = lab.box("sh", "-c", 'echo "$CONTAINER_IMAGE" >> images; touch up; sleep 600')
    lab.until(job, "RUNNING")
    wait_until(lambda: (lab.home / "up").exists(), what="the job")
    (lab.home / "up").unlink()
    lab.call("POST", "/v1/jobs/requeue", {"ids": [job]})
    wait_until(lambda: (lab.home / "up").exists(), what="its second run")
    images = (lab.home / "images").read_text().splitlines()
    assert len(images) == 2
    assert len(set(images)) == 1
    lab.call("POST", "/v1/jobs/cancel", {"ids": [job]})
    assert lab.until(job)["state"] == "CANCELLED"


def test_ranks_have_containers_with_their_own_gpus_and_end_together(lab: Box) -> None:
    text = 'echo "$RANK $LOCAL_RANK $WORLD_SIZE $MASTER_ADDR $SLURM_PROCID $CUDA_VISIBLE_DEVICES" > draft.$RANK; '
    text += "mv draft.$RANK rank.$RANK; "
    text += "until [ -e rank.0 -a -e rank.1 ]; do sleep 0.02; done; [ $RANK = 0 ] || exit 7; exec sleep 600"
    job = lab.box("sh", "-c", text, gpus=None, ntasks=2, gpus_per_task=1)
    ended = lab.until(job)
    assert (ended["state"], ended["exit_code"]) == ("FAILED", 7)
    assert ended["reason_text"].startswith("exit code 7 of rank 1")
    uuids = [gpu["uuid"] for gpu in ended["runs"][-1]["gpus"]]
    for rank, uuid in enumerate(uuids):
        assert (lab.home / f"rank.{rank}").read_text() == f"{rank} {rank} 2 127.0.0.1 {rank} {uuid}\n"


def test_what_cannot_run_is_refused_with_the_reason(lab: Box) -> None:
    (lab.home / "x.sif").touch()
    cases: list[tuple[dict[str, Any], str, str]] = [
        ({"image": "--privileged"}, "not an image reference", "for example"),
        ({"image": "alpine@sha256:12"}, "not a digest", "for example"),
        ({"binds": ["/:/host"]}, "/ of the host is not mounted", "one of your folders"),
        ({"binds": ["/var/run/docker.sock:/s"]}, "not mounted into containers", "one of your folders"),
        ({"binds": ["data:/data"]}, "absolute paths", "for example"),
        ({"image": None, "binds": ["/tmp:/d"]}, "--bind requires --image", "add --image"),
        ({"venv": "/v"}, "--venv and --image", "leave one out"),
        ({"work_dir": "/run/user"}, "/run/user of the host is not mounted", "-D"),
        ({"nodes": 2, "gpus": 2}, "", ""),
        ({"container_workdir": "x"}, "must be absolute", "/path"),
    ]
    for spec, text, hint in cases:
        error = lab.refusal(**spec)
        assert (text in error.message, hint in error.hint) == (True, True), (spec, error.message, error.hint)


def test_a_file_that_is_not_there_fails_before_a_gpu_is_taken(lab: Box) -> None:
    job = lab.box("true", image="gone.sif")
    lab.call("POST", "/v1/jobs/update", {"ids": [lab.pull_of(job)], "changes": {"retries": 0}})
    ended = lab.until(job)
    assert f"there is no file {lab.home}/gone.sif" in ended["reason_text"]


def test_a_link_into_a_shut_folder_is_found_at_the_start(lab: Box) -> None:
    (lab.home / "link").symlink_to("/dev")
    job = lab.box("true", binds=[f"{lab.home}/link:/d"])
    ended = lab.until(job)
    assert (ended["state"], ended["reason"]) == ("FAILED", "JobLaunchFailure")
    assert "/dev of the host is not mounted" in ended["reason_text"]


def test_settings_decide_which_images_and_whether_any(lab: Box) -> None:
    config = lab.home / "config.toml"
    before = config.read_text()
    try:
        config.write_text(before.replace('"apptainer"', '"apptainer"\nallowed = ["nvcr.io/nvidia"]'))
        lab.call("POST", "/v1/reload")
        assert "not among the images" in lab.refusal().message
        config.write_text(before.replace('"apptainer"', '"none"'))
        lab.call("POST", "/v1/reload")
        assert "switched off here" in lab.refusal().message
    finally:
        config.write_text(before)
        lab.call("POST", "/v1/reload")


@pytest.mark.parametrize(
    "crash",
    [
        "commit:2",
        *(pytest.param(f"{step}:{n}", marks=pytest.mark.nightly) for step in STEPS for n in range(1, 8)),
    ],
)
def test_a_daemon_killed_at_any_step_of_a_pull_pins_the_image_once(crash: str, tmp_path: Path) -> None:
    box = Box(tmp_path / "home")
    box.start(**{VARIABLE: crash})
    known: list[str] = []
    job: dict[str, Any] = {}
    jobs: list[dict[str, Any]] = []

    def has_ended() -> bool:
        """Whether it has, submitted by now; starts a killed daemon again."""
        if box.process is not None and box.process.poll() is not None:
            box.reap()
            box.start()
        try:
            if not known:
                known.append(
                    box.box("sh", "-c", 'echo "$CONTAINER_IMAGE"', key="once", stdout="out", open_mode="append")
                )
            job.update(box.job(known[0]))
            jobs[:] = box.call("GET", "/v1/jobs?states=all")["jobs"]
        except (DaemonUnreachable, OSError):
            return False
        return job["state"] in FINAL

    try:
        wait_until(has_ended, what="the job")
        assert job["state"] == "COMPLETED"
        assert sorted(one["name"] for one in jobs) == [f"pull {IMAGE}", "sh"]
        pinned = job["spec"]["launch"]["image_digest"]
        assert (box.home / "out").read_text() == f"{pinned}\n"
    finally:
        # Its crash may be yet to come.
        box.kill()
        box.close()


# --- podman, below the daemon -----------------------------------------------------------------------------


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[LocalBench]:
    made = LocalBench(tmp_path)
    yield made
    made.close()


def container(bench: LocalBench, **changes: Any) -> ContainerLaunch:
    runtimes = StandIns(bench.folder / "bin")
    image = f"docker.io/library/alpine@sha256:{DIGEST}"
    return ContainerLaunch(**{"runtime": "podman", "program": runtimes.program("podman"), "image": image, **changes})


def test_podman_gets_the_run_and_what_is_left_of_the_container_is_removed(bench: LocalBench) -> None:
    runtimes = StandIns(bench.folder / "bin")
    (bench.folder / "bin" / "forgets").touch()
    text = 'echo "$CONTAINER_IMAGE $inside_GPUSCHED_RUN $inside_LD_PRELOAD. $inside_NVIDIA_VISIBLE_DEVICES"; exit 4'
    env = {"PATH": os.environ["PATH"], "LD_PRELOAD": ""}
    bench.start("1.1", argv=("sh", "-c", text), env=env, container=container(bench))
    assert bench.end_of("1.1").exit_code == 4
    assert bench.output("1.1") == f"docker.io/library/alpine@sha256:{DIGEST} 1.1 . void\n"
    name = container_name("1.1", str(bench.spool))
    assert runtimes.calls()[-1].split()[-2:] == ["--time=0", name]
    assert runtimes.names() == []


RANKS = tuple(
    RankLaunch({"RANK": str(n), "CUDA_VISIBLE_DEVICES": f"GPU-{n}"}, n, f"rank{n}.out", None, None, (f"GPU-{n}",))
    for n in range(2)
)


@pytest.mark.parametrize("runtime", ["podman", "apptainer"])
def test_each_rank_has_a_container_with_its_own_variables(runtime: str, bench: LocalBench) -> None:
    runtimes = StandIns(bench.folder / "bin")
    (bench.folder / "bin" / "forgets").touch()
    (bench.folder / "x.sif").touch()
    prefix = "inside_" if runtime == "podman" else ""
    names = ("RANK", "CUDA_VISIBLE_DEVICES", "WORLD_SIZE", "GPUSCHED_RUN")
    text = " ".join(f"${prefix}{name}" for name in names)
    launch = container(bench, runtime=runtime, program=runtimes.program(runtime))
    if runtime == "apptainer":
        launch = replace(launch, image=f"{bench.folder}/x.sif")
    env = {"PATH": os.environ["PATH"], "WORLD_SIZE": "2", "CUDA_VISIBLE_DEVICES": "GPU-0,GPU-1"}
    bench.start("1.1", argv=("sh", "-c", f"echo {text}"), env=env, container=launch, ranks=RANKS)
    assert bench.end_of("1.1").exit_code == 0
    for n in range(2):
        assert (bench.folder / f"rank{n}.out").read_text() == f"{n} GPU-{n} 2 1.1\n"
    if runtime == "podman":
        expected = [container_name("1.1", str(bench.spool), n) for n in range(2)]
        assert runtimes.calls()[-1].split()[-3:] == ["--time=0", *expected]
        assert runtimes.names() == []


def test_the_first_bad_rank_ends_the_containers_of_the_others(bench: LocalBench) -> None:
    runtimes = StandIns(bench.folder / "bin")
    text = "touch up.$inside_RANK; while ! [ -e up.0 -a -e up.1 ]; do sleep 0.02; done; "
    text += "[ $inside_RANK = 1 ] && exit 5; exec sleep 600"
    bench.start("1.1", argv=("sh", "-c", text), container=container(bench), ranks=RANKS)
    ended = bench.end_of("1.1")
    assert (ended.exit_code, ended.rank, ended.stopped_by) == (5, 1, None)
    assert not bench.processes()
    assert runtimes.names() == []


def test_a_killed_supervisor_leaves_no_rank_behind(bench: LocalBench) -> None:
    runtimes = StandIns(bench.folder / "bin")
    launch = container(bench)
    text = "touch up.$inside_RANK; exec sleep 600"
    bench.start("1.1", argv=("sh", "-c", text), container=launch, ranks=RANKS)
    started = bench.until("1.1", RunStarted)
    wait_until(lambda: len(list(bench.folder.glob("up.*"))) == 2, what="both ranks")
    os.kill(started.supervisor_pid, signal.SIGKILL)
    bench.until("1.1", RunLost)
    assert not bench.processes()
    assert len(runtimes.names()) == 2
    bench.start("2.1", argv=("x",), container=container(bench, image="docker.io/library/alpine:3", is_pull=True))
    assert isinstance(bench.end_of("2.1"), RunEnded)
    assert runtimes.names() == []


def test_a_pull_reports_the_digest_and_removes_its_output(bench: LocalBench) -> None:
    launch = container(bench, image="docker.io/library/alpine:3", is_pull=True)
    bench.start("1.1", argv=("x",), container=launch)
    ended = bench.end_of("1.1")
    assert (ended.exit_code, ended.detail) == (0, f"docker.io/library/alpine@sha256:{DIGEST}")
    assert not (bench.folder / "1.1.out").exists()


def test_a_failed_pull_reports_the_last_line(bench: LocalBench) -> None:
    launch = container(bench, image="docker.io/library/none-such:1", is_pull=True)
    bench.start("1.1", argv=("x",), container=launch)
    ended = bench.end_of("1.1")
    assert (ended.exit_code, ended.detail) == (125, None)
    assert ended.cause == "initializing source docker://docker.io/library/none-such:1: manifest unknown"


def test_a_stop_is_for_the_job_and_not_for_podman(bench: LocalBench) -> None:
    text = 'trap "echo saved; exit 0" TERM; touch up; while :; do sleep 0.05; done'
    bench.start("1.1", argv=("sh", "-c", text), container=container(bench), grace_s=20.0)
    bench.until("1.1", RunStarted)
    wait_until(lambda: (bench.folder / "up").exists(), what="the job")
    bench.engine.order("1.1", StopOrder("cancel"))
    assert bench.end_of("1.1").stopped_by == "cancel"
    assert "saved" in bench.output("1.1")


def test_the_next_pull_removes_containers_of_killed_supervisors(bench: LocalBench) -> None:
    runtimes = StandIns(bench.folder / "bin")
    launch = container(bench)
    bench.start("1.1", argv=("sh", "-c", "touch up; sleep 600"), container=launch)
    started = bench.until("1.1", RunStarted)
    wait_until(lambda: (bench.folder / "up").exists(), what="the job")
    os.kill(started.supervisor_pid, signal.SIGKILL)
    bench.until("1.1", RunLost)
    assert not bench.processes()
    (left,) = runtimes.names()
    pull = container(bench, image="docker.io/library/alpine:3", is_pull=True)
    bench.start("2.1", argv=("x",), container=pull)
    assert isinstance(bench.end_of("2.1"), RunEnded)
    assert runtimes.names() == [], left


def test_gpus_without_a_specification_start_nothing(bench: LocalBench) -> None:
    if os.path.isdir("/etc/cdi") or os.path.isdir("/var/run/cdi"):
        pytest.skip("this machine has CDI specifications")
    bench.start("1.1", argv=("true",), container=container(bench, gpus=(("GPU-a", 0),)))
    assert "nvidia-ctk cdi generate" in (bench.end_of("1.1").launch_error or "")
