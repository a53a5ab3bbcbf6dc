"""What is reached on another node that shares no folder with the head: a real head, and an agent behind a mount."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from clusters import Cluster
from support import is_alive, wait_until

UNSHARE = ["unshare", *(() if os.geteuid() == 0 else ("--map-current-user", "--keep-caps")), "-m"]


def can_mount() -> bool:
    try:
        return subprocess.run([*UNSHARE, "true"], check=False, capture_output=True).returncode == 0
    except OSError:
        return False


pytestmark = pytest.mark.skipif(not can_mount(), reason="no mount namespaces for this user")


WITHIN = """{unshare} sh -c 'mount --bind {root}/disk {root}/work && mount --bind {root}/copies {root}/home/snapshots &&
    exec "$@"' sh"""


class Pair(Cluster):
    """The head `n1` and a node `n2`, to which the folder `work` is another one than to the head."""

    def __init__(self, root: Path) -> None:
        self.work, self.disk = root / "work", root / "disk"
        for folder in (self.work, self.disk, root / "copies", root / "home", root / "home" / "snapshots"):
            folder.mkdir(mode=0o700)
        within = WITHIN.format(root=root, unshare=" ".join(UNSHARE))
        super().__init__(root, ["n2"], within=within, settings="[limit]\nnode_output_mib = 2\n")

    @property
    def outputs(self) -> Path:
        """Where n2 keeps output that cannot be written where it was wanted."""
        return self.root / "n2" / "agent-n2" / "outputs"

    def there(self, text: str, **spec: Any) -> str:
        """Submit a shell line to n2."""
        found = {"work_dir": str(self.work), "nodelist": ["n2"], **spec}
        return self.head.submit("sh", "-c", text, **found)


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    made = Pair(tmp_path_factory.mktemp("reach"))
    yield made
    made.head.close()


@pytest.fixture
def pair(started: Pair) -> Iterator[Pair]:
    """The same for all tests, without jobs and connected."""
    yield started
    started.reset()
    for entry in started.disk.iterdir():
        if entry.is_file():
            entry.unlink()


GO = "until [ -e {work}/go ]; do sleep 0.05; done"


def test_output_is_read_where_it_is(pair: Pair) -> None:
    job = pair.there("seq 1 5; echo oops >&2", stderr=str(pair.work / "err-%j"))
    (ended,) = pair.head.wait(job)
    assert ended["state"] == "COMPLETED"
    assert not list(pair.work.iterdir()), "the head has nothing of it"
    assert pair.run("glogs", job).stdout == "1\n2\n3\n4\n5\n"
    assert pair.run("glogs", "-n", "2", job).stdout == "4\n5\n"
    assert pair.run("glogs", "--err", job).stdout == "oops\n"
    assert pair.run("glogs", "-f", job).stdout == "1\n2\n3\n4\n5\n"


def test_large_output_arrives_as_it_was_written(pair: Pair) -> None:
    job = pair.there("seq 1 400000")
    pair.head.wait(job)
    whole = "".join(f"{number}\n" for number in range(1, 400_001))
    assert pair.run("glogs", job).stdout == whole
    end = pair.head.call("GET", f"/v1/jobs/{job}/log")
    assert (end["node"], end["page"], end["size"]) == ("n2", end["pages"], len(whole))
    first, second = (pair.head.call("GET", f"/v1/jobs/{job}/log?page={page}")["text"] for page in (1, 2))
    assert whole.startswith(first + second)
    assert whole.endswith("\n" + end["text"])


def test_rotated_output_is_read_from_its_oldest_file_on(pair: Pair) -> None:
    job = pair.there("seq 1 300000", log_max_mib=1, log_keep=3)
    pair.head.wait(job)
    found = pair.run("glogs", job).stdout.split()
    assert len(list(pair.disk.iterdir())) > 1
    assert found[-1] == "300000"
    assert [int(word) for word in found[1:]] == list(range(int(found[1]), 300_001))


def test_following_survives_the_death_of_agent_and_head(pair: Pair) -> None:
    job = pair.there(f"echo one; {GO.format(work=pair.work)}; echo two; exit 3")
    follow = pair.start("glogs", "-f", job)
    assert follow.stdout is not None
    assert follow.stdout.readline() == "one\n"
    before = pair.agent("n2")
    pair.kill_agent("n2")
    wait_until(lambda: pair.agent("n2") != before, what="another agent")
    pair.heal("n2")
    pair.head.kill()
    pair.head.start()
    pair.heal("n2")
    (pair.disk / "go").touch()
    rest, _ = follow.communicate(timeout=60)
    assert (rest, follow.returncode) == ("two\n", 3)


def test_a_node_that_does_not_answer_is_named_with_the_place_of_the_output(pair: Pair) -> None:
    job = pair.there("echo one")
    (ended,) = pair.head.wait(job)
    pair.cut("n2")
    result = pair.run("glogs", job)
    assert result.returncode != 0
    assert "node n2 does not answer" in result.stderr
    assert f"its output is at {ended['stdout_path']} there" in result.stderr


def test_on_a_shared_file_system_the_file_here_is_read_when_the_node_is_silent(pair: Pair) -> None:
    job = pair.there("echo one", stdout=str(pair.root / "shared-%j"))
    pair.head.wait(job)
    pair.cut("n2")
    assert pair.run("glogs", job).stdout == "one\n"
    assert pair.run("glogs", "-f", job).stdout == "one\n"


def test_output_that_cannot_be_written_on_the_node_is_kept_there_and_read_from_the_head(pair: Pair) -> None:
    job = pair.there(f"echo one; {GO.format(work=pair.work)}; echo end; exit 3", stdout="/proc/none/out-%j")
    follow = pair.start("glogs", "-f", job)
    assert follow.stdout is not None
    assert follow.stdout.readline() == "one\n"
    folder = pair.outputs / f"{job}.1"
    story = pair.run("gshow", job).stdout
    assert f"cannot make /proc/none for the output: No such file or directory; it is kept in {folder} on n2" in story
    kept = folder / "proc" / "none" / f"out-{job}"
    assert (kept.read_text(), folder.stat().st_mode & 0o777) == ("one\n", 0o700)
    # Nothing of it depends on who watches.
    pair.kill_agent("n2")
    pair.head.kill()
    pair.head.start()
    pair.heal("n2")
    (pair.disk / "go").touch()
    rest, _ = follow.communicate(timeout=60)
    assert (rest, follow.returncode) == ("end\n", 3)
    assert pair.run("glogs", "-n", "1", job).stdout == "end\n"
    assert pair.run("gshow", job).stdout.count("is kept in") == 1


def test_each_rank_may_have_such_output_up_to_a_size(pair: Pair) -> None:
    job = pair.there("seq 1 400000; echo $RANK", stdout="/proc/none/out-%t", ntasks_per_node=2)
    pair.head.wait(job)
    for rank in ("0", "1"):
        lines = pair.run("glogs", "--rank", rank, job).stdout.splitlines()
        sizes = [path.stat().st_size for path in (pair.outputs / f"{job}.1").rglob(f"out-{rank}*")]
        assert (lines[-2:], len(sizes), sum(sizes) < 2 << 20) == (["400000", rank], 2, True)
    shown = pair.run("gshow", job).stdout
    assert "so is that of 1 more file" in shown
    assert [f"  output /proc/none/out-{rank} (rank {rank} on n2)" in shown for rank in (0, 1)] == [True, True]


def test_a_snapshot_is_fetched_once_and_stays_while_it_is_used(pair: Pair) -> None:
    code = pair.root / "code"
    (code / "sub").mkdir(parents=True)
    (code / "sub" / "run.sh").write_text("#!/bin/sh\ncat link; pwd\n")
    (code / "sub" / "run.sh").chmod(0o755)
    (code / "sub" / "data").write_text("as submitted\n")
    (code / "large").write_bytes(os.urandom(9 << 20))
    (code / "link").symlink_to("sub/data")

    def submit() -> str:
        words = ("--snapshot=copy", "-w", "n2", "-o", str(pair.root / "snap-%j"), "-D", str(code))
        return pair.run("gsub", "--parsable", *words, "--", "sub/run.sh").stdout.strip()

    first = submit()
    (code / "sub" / "data").write_text("edited\n")
    (ended,) = pair.head.wait(first)
    assert ended["state"] == "COMPLETED", ended["reason_text"]
    assert pair.run("glogs", first).stdout == f"as submitted\n{ended['work_dir']}\n"
    home = pair.root / "copies" / Path(ended["work_dir"]).parents[1].name
    (there,) = [path for path in home.iterdir() if path.is_dir()]
    here = pair.root / "home" / "snapshots" / home.name / there.name
    same = subprocess.run(["diff", "-r", here / "tree", there / "tree"], capture_output=True, text=True)
    assert (same.returncode, same.stdout) == (0, "")
    modes = [(path.relative_to(top), path.lstat().st_mode) for top in (here, there) for path in sorted(top.rglob("*"))]
    assert modes[: len(modes) // 2] == modes[len(modes) // 2 :]
    before = there.stat().st_ino
    (code / "sub" / "data").write_text("as submitted\n")
    (again,) = pair.head.wait(submit())
    assert (again["state"], there.stat().st_ino) == ("COMPLETED", before)


def test_a_snapshot_that_is_gone_fails_the_job_with_a_sentence(pair: Pair) -> None:
    code = pair.root / "gone"
    code.mkdir()
    (code / "a").write_text("a")
    words = ("--snapshot=copy", "--parsable", "-H", "-w", "n2", "-D", str(code))
    job = pair.run("gsub", *words, "--", "true").stdout.strip()
    folder = Path(pair.head.job(job)["work_dir"]).parent
    subprocess.run(["chmod", "-R", "u+w", folder], check=True)
    subprocess.run(["rm", "-r", folder], check=True)
    pair.run("gctl", "release", job)
    (ended,) = pair.head.wait(job)
    assert ended["state"] == "FAILED"
    assert f"its snapshot {folder.name} cannot be fetched: {folder} cannot be read: " in ended["reason_text"]
    assert not list((pair.root / "copies").rglob(".new-*"))


def test_the_progress_of_a_job_comes_from_its_node(pair: Pair) -> None:
    go = GO.format(work=pair.work)
    line = f'echo "30/100 epoch 3" > $GPUSCHED_PROGRESS; {go}; echo 0.9 > $GPUSCHED_PROGRESS; sleep 600'
    job = pair.there(line)

    def shown() -> list[str]:
        return [text for text in ("30%", "90%") if text in pair.run("gshow", job).stdout]

    wait_until(lambda: shown() == ["30%"], what="the first report")
    assert "30%" in pair.run("gq").stdout
    assert "30/100 epoch 3" in pair.run("gshow", job).stdout
    (pair.disk / "go").touch()
    wait_until(lambda: shown() == ["90%"], what="the second report")


def test_a_node_that_was_left_out_is_taken_back_by_an_empty_exclude(pair: Pair) -> None:
    job = pair.there("true", exclude=["n1"], hold=True)
    assert pair.run("gctl", "update", job, "exclude=").stderr == ""
    assert pair.head.job(job)["exclude"] == []
    pair.run("gctl", "release", job)
    (ended,) = pair.head.wait(job)
    assert ended["state"] == "COMPLETED"


def test_a_mistaken_output_path_fails_on_a_node_as_on_the_head(pair: Pair) -> None:
    job = pair.there("true", stdout="/dev/null/out")
    (ended,) = pair.head.wait(job)
    assert ended["state"] == "FAILED"
    assert "cannot write the output to /dev/null/out: Not a directory (on node n2)" in ended["reason_text"]


def test_a_missing_output_is_a_sentence(pair: Pair) -> None:
    job = pair.there("rm $PWD/*")
    pair.head.wait(job)
    result = pair.run("glogs", job)
    assert result.returncode != 0
    assert "cannot open" in result.stderr


def test_the_client_for_python_reads_it_too(pair: Pair) -> None:
    job = pair.there("seq 1 3")
    pair.head.wait(job)
    code = f"import gpusched; c = gpusched.Client(); print(list(c.logs('{job}')), list(c.logs('{job}', follow=True)))"
    result = subprocess.run(
        [sys.executable, "-c", code], env=pair.head.env, text=True, capture_output=True, check=True, timeout=60
    )
    assert result.stdout == "['1\\n', '2\\n', '3\\n'] ['1\\n', '2\\n', '3\\n']\n"


BIN = Path(sys.executable).parent


def in_job(text: str) -> str:
    """A shell line that finds the commands."""
    return f"PATH={BIN}:$PATH; {text}"


def test_programs_of_a_job_use_the_scheduler_from_its_node(pair: Pair) -> None:
    job = pair.there(in_job("gq; gsub -n 1 -w n1 -- echo hello; gwait @ && gshow @"))
    (ended,) = pair.head.wait(job)
    said = pair.run("glogs", job).stdout
    assert ended["exit_code"] == 0, said
    child = str(int(job) + 1)
    assert pair.head.job(child)["state"] == "COMPLETED", said
    assert pair.head.job(child)["node"] == "n1"


def test_the_socket_on_the_node_is_back_after_the_agent_was_killed(pair: Pair) -> None:
    job = pair.there(in_job(f"{GO.format(work=pair.work)}; gq"))
    pair.head.pid_of(job)
    pair.kill_agent("n2")
    # While there is no agent, the command waits for the next one.
    (pair.disk / "go").touch()
    (ended,) = pair.head.wait(job)
    assert ended["exit_code"] == 0, pair.run("glogs", job).stdout


def test_sbatch_jobs_run_on_another_node_with_steps(pair: Pair) -> None:
    script = "#!/bin/sh\nsrun -n 2 sh -c 'echo $SLURM_PROCID of $SLURM_NTASKS on $SLURMD_NODENAME'\nsrun false\n"
    spec = {"script": script, "slurm": True, "nodelist": ["n2"], "work_dir": str(pair.work), "cpus": 2}
    job = pair.head.submit(**spec)
    (ended,) = pair.head.wait(job)
    said = pair.run("glogs", job).stdout
    assert (ended["node"], ended["exit_code"]) == ("n2", 1), said
    assert sorted(said.splitlines())[:2] == ["0 of 2 on n2", "1 of 2 on n2"]
    steps = pair.head.call("GET", f"/v1/steps?ids={job}&states=all")["steps"]
    assert [(step["node"], step["state"]) for step in steps] == [("n2", "COMPLETED"), ("n2", "FAILED")]


def test_a_program_of_no_job_is_refused_on_a_node(pair: Pair) -> None:
    env = {**pair.head.env, "GPUSCHED_SOCKET": str(pair.root / "n2" / "agent-n2" / "api.sock")}
    result = subprocess.run([BIN / "gq"], env=env, text=True, capture_output=True, timeout=60)
    assert result.returncode != 0
    assert "belongs to no running job of" in result.stderr
    assert "on node n2" in result.stderr


def test_a_missing_working_directory_names_node_and_path(pair: Pair) -> None:
    folder = pair.work / "only-on-the-head"
    folder.mkdir()
    job = pair.there("true", work_dir=str(folder), stdout=str(pair.root / "out-%j"))
    (ended,) = pair.head.wait(job)
    folder.rmdir()
    assert (ended["state"], len(ended["runs"])) == ("FAILED", 1)
    text = f"cannot enter the working directory {folder}: No such file or directory (on node n2)"
    assert text in ended["reason_text"]


def test_a_command_starts_in_a_job_on_another_node(pair: Pair) -> None:
    job = pair.there(f"cd /; {GO.format(work=pair.work)}")
    pair.head.pid_of(job)
    result = pair.run(
        "grun", "--job", job, "sh", "-c", "read word; echo $word on $SLURMD_NODENAME; exit 4", input="hi\n"
    )
    assert (result.stdout, result.returncode) == ("hi on n2\n", 4), result.stderr
    named = pair.run("grun", "--job", job, "-w", "n2", "pwd")
    assert named.stdout == f"{pair.work}\n", named.stderr
    wrong = pair.run("grun", "--job", job, "-w", "n1", "true")
    assert f"job {job} does not run on node n1" in wrong.stderr


def test_a_shell_opens_on_each_node_of_a_gang(pair: Pair) -> None:
    folder = pair.root / "gang"
    folder.mkdir()
    job = pair.head.submit("sleep", "600", nodes=2, gpus=2, work_dir=str(folder))
    pair.head.wait_state(job, "RUNNING")
    for node in ("n1", "n2"):
        result = pair.run("grun", "--job", job, "-w", node, "sh", "-c", "echo $SLURMD_NODENAME")
        assert result.stdout == f"{node}\n", result.stderr


def test_a_foreground_job_runs_on_the_node_that_it_names(pair: Pair) -> None:
    line = "read word; echo $word on $SLURMD_NODENAME; echo oops >&2; exit 5"
    result = pair.run("grun", "-w", "n2", "-D", str(pair.work), "sh", "-c", line, input="hi\n")
    assert (result.stdout, result.returncode) == ("hi on n2\n", 5), result.stderr
    assert "oops" in result.stderr


def test_much_output_of_a_foreground_job_arrives_whole(pair: Pair) -> None:
    result = pair.run("grun", "-w", "n2", "-D", str(pair.work), "seq", "1", "300000")
    assert result.stdout == "".join(f"{number}\n" for number in range(1, 300_001)), result.stderr


def test_a_foreground_job_ends_with_its_client(pair: Pair) -> None:
    client = pair.start("grun", "-w", "n2", "-D", str(pair.work), "sh", "-c", "echo $$; exec sleep 600")
    assert client.stdout is not None
    pid = int(client.stdout.readline())
    client.kill()
    client.communicate()
    wait_until(lambda: not is_alive(pid), what="the job to end")


def test_a_kept_foreground_job_outlives_agent_and_head(pair: Pair) -> None:
    line = "echo begun; read word; echo $word; exit 6"
    client = pair.start("grun", "--keep", "-w", "n2", "-D", str(pair.work), "sh", "-c", line, stdin=subprocess.PIPE)
    assert client.stdout is not None
    assert client.stdout.readline() == "begun\n"
    (job,) = [job["id"] for job in pair.head.call("GET", "/v1/jobs")["jobs"]]
    pair.kill_agent("n2")
    pair.head.kill()
    client.kill()
    client.communicate()
    pair.head.start()
    pair.heal("n2")
    assert pair.head.state(job) == "RUNNING"
    again = pair.run("grun", "--attach", job, input="done\n")
    assert (again.stdout.splitlines()[-1:], again.returncode) == (["done"], 6), again.stderr


COUNTED = """i=0; while read word; do echo "$word"; [ "$word" = end ] && exit 7;
    for k in 1 2 3 4 5 6 7 8 9; do i=$((i + 1)); echo $i; done; done"""


def counts(client: subprocess.Popen[str], rounds: int) -> list[str]:
    """Feed a client that counts, and read what it answers."""
    assert client.stdin is not None
    assert client.stdout is not None
    found = []
    for _ in range(rounds):
        client.stdin.write("go\n")
        client.stdin.flush()
        found += [client.stdout.readline().strip() for _ in range(10)]
    return [word for word in found if word != "go"]


@pytest.mark.nightly
def test_a_foreground_job_goes_on_after_a_break_without_losing_a_byte(pair: Pair) -> None:
    errors = pair.root / "errors"
    with errors.open("w") as stderr:
        client = pair.start(
            "grun", "-w", "n2", "-D", str(pair.work), "sh", "-c", COUNTED, stdin=subprocess.PIPE, stderr=stderr
        )
    assert client.stdin is not None
    found = counts(client, 3)
    pair.cut("n2")
    # Typed into the break.
    client.stdin.write("go\n")
    client.stdin.flush()
    wait_until(lambda: "lost the connection to n2; trying again for 60 s" in errors.read_text(), what="the notice")
    pair.heal("n2")
    assert client.stdout is not None
    found += [client.stdout.readline().strip() for _ in range(10)][1:]
    pair.head.kill()
    pair.head.start()
    pair.heal("n2")
    found += counts(client, 3)
    rest, _ = client.communicate("end\n", timeout=60)
    assert (found, rest, client.returncode) == ([str(at) for at in range(1, 64)], "end\n", 7), errors.read_text()
    assert "connected to n2 again" in errors.read_text()


def test_much_output_crosses_a_break(pair: Pair) -> None:
    with (pair.root / "counted").open("w") as out:
        client = subprocess.Popen(
            pair.argv("grun", "-w", "n2", "-D", str(pair.work), "sh", "-c", "seq 1 40000; sleep 0.3; seq 40001 600000"),
            env=pair.head.env,
            stdout=out,
            stderr=subprocess.DEVNULL,
        )
    wait_until(lambda: (pair.root / "counted").stat().st_size > 100_000, what="some output")
    pair.kill_agent("n2")
    assert client.wait(60) == 0
    assert (pair.root / "counted").read_text() == "".join(f"{number}\n" for number in range(1, 600_001))


@pytest.mark.nightly
def test_a_run_that_ends_in_a_break_reports_its_code_and_where_its_output_is(pair: Pair) -> None:
    line = f"echo one; {GO.format(work=pair.work)}; echo two; exit 3"
    client = pair.start("grun", "-w", "n2", "-D", str(pair.work), "sh", "-c", line, stderr=subprocess.PIPE)
    assert client.stdout is not None
    assert client.stdout.readline() == "one\n"
    (job,) = [job["id"] for job in pair.head.call("GET", "/v1/jobs")["jobs"]]
    pid = pair.head.pid_of(job)
    pair.cut("n2")
    (pair.disk / "go").touch()
    wait_until(lambda: not is_alive(pid), what="the job to end")
    pair.heal("n2")
    _, errors = client.communicate(timeout=60)
    assert client.returncode == 3, errors
    assert f"job {job} ended meanwhile; the rest of its output: glogs {job}" in errors
    assert pair.run("glogs", job).stdout == "one\ntwo\n"
