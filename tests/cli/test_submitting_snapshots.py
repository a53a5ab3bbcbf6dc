"""gsub --snapshot: every run starts in the code as it was submitted."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import pytest
from shell import Shell

from gpusched.snapshots.snapshot import remove


@pytest.fixture
def code(sh: Shell, tmp_path: Path) -> Path:
    (tmp_path / "code" / "sub").mkdir(parents=True)
    (tmp_path / "code" / "value").write_text("first\n")
    sh.env["GIT_CEILING_DIRECTORIES"] = str(tmp_path)
    return tmp_path / "code"


def shown(sh: Shell, job_id: str) -> dict[str, object]:
    return dict(json.loads(sh.ok("gshow", "--json", job_id))["jobs"][0])


def freeze(sh: Shell, folder: Path, *words: str) -> str:
    done = sh.type("gsub", "--parsable", "--snapshot", *words, cwd=folder)
    assert done.code == 0, done
    return done.out.strip()


def test_the_first_run_and_every_retry_see_the_original_code(sh: Shell, code: Path, tmp_path: Path) -> None:
    line = f"cat value; echo changed > {code}/value; [ -e {tmp_path}/tried ] || {{ touch {tmp_path}/tried; exit 1; }}"
    job_id = freeze(sh, code, "--hold", "--retries", "1", "--backoff", "0", "--wrap", line)
    (code / "value").write_text("second\n")
    sh.ok("gctl", "release", job_id)
    sh.ok("gwait", job_id)
    # Outputs are where they would have been without a snapshot.
    outputs = [(code / f"gpusched-{job_id}.out{ending}").read_text() for ending in ("", ".2")]
    assert outputs == ["first\n", "first\n"]
    assert (code / "value").read_text() == "changed\n"


def test_the_job_knows_its_original_folder_and_starts_in_the_copy(sh: Shell, code: Path) -> None:
    job_id = freeze(sh, code / "sub", "-W", "-o", "o", "--wrap", "pwd; echo $GPUSCHED_SUBMIT_DIR $SLURM_SUBMIT_DIR")
    where, told = (code / "sub" / "o").read_text().splitlines()
    assert told == f"{code}/sub {code}/sub"
    job = shown(sh, job_id)
    assert (job["work_dir"], job["submit_dir"]) == (where, f"{code}/sub")
    assert where.endswith(f"/{job['snapshot']}/tree")


def test_gshow_shows_commit_state_file_count_and_location(sh: Shell, code: Path) -> None:
    plain = freeze(sh, code, "--hold", "--", "true")
    assert "plain copy, 1 files, 1K, in /" in sh.ok("gshow", plain)
    if shutil.which("git") is None:
        pytest.skip("git is not installed")
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@example.org"]
    for words in (["init", "-q", "."], ["add", "."], ["commit", "-qm", "x"]):
        assert os.spawnvp(os.P_WAIT, "git", [*git, "-C", str(code), *words]) == 0
    clean = freeze(sh, code, "--hold", "--", "true")
    (code / "value").write_text("dirty")
    dirty = freeze(sh, code, "--hold", "--", "true")
    about = shown(sh, dirty)["snapshot_about"]
    assert isinstance(about, dict)
    commit = about["commit"][:12]
    assert f"commit {commit}, 1 files" in sh.ok("gshow", clean)
    assert f"commit {commit} with changes, 1 files" in sh.ok("gshow", dirty)


def test_a_job_without_its_snapshot_fails_with_that_reason(sh: Shell, code: Path) -> None:
    job_id = freeze(sh, code, "--hold", "--retries", "2", "--", "true")
    name = shown(sh, job_id)["snapshot"]
    remove(str(Path(str(shown(sh, job_id)["work_dir"])).parent))
    assert "deleted or another user's" in sh.ok("gshow", job_id)
    sh.ok("gctl", "release", job_id)
    done = sh.type("gwait", job_id)
    assert done.code == 1
    assert f"its snapshot {name} is gone" in done.err


def test_a_repeat_starts_in_the_same_copy_unless_redirected(sh: Shell, code: Path) -> None:
    first = freeze(sh, code, "-W", "-o", "o", "--wrap", "cat value")
    (code / "value").write_text("second\n")
    again = sh.ok("gsub", "--parsable", "-W", "--resubmit", first).strip()
    assert (code / "o").read_text() == "first\n"
    assert shown(sh, again)["snapshot"] == shown(sh, first)["snapshot"]
    moved = sh.ok("gsub", "--parsable", "-W", "--resubmit", first, "-D", str(code)).strip()
    assert (code / "o").read_text() == "second\n"
    assert shown(sh, moved)["snapshot"] is None
    assert "own snapshot" in sh.type("gsub", "--snapshot", "--resubmit", first).err


def test_a_job_without_its_copy_is_not_repeated(sh: Shell, code: Path) -> None:
    first = freeze(sh, code, "-W", "--wrap", "cat value")
    remove(str(Path(str(shown(sh, first)["work_dir"])).parent))
    done = sh.type("gsub", "--resubmit", first)
    assert (done.code, done.out) == (1, "")
    assert f"the snapshot that job {first} started in is gone" in done.err
    assert f"gsub --resubmit {first} -D ." in done.err
    assert sh.type("gsub", "--hold", "--resubmit", first, "-D", str(code)).code == 0


def test_code_outside_the_copy_is_reported(sh: Shell, code: Path) -> None:
    (code / "m.py").write_text("WORD = 'old'\n")
    (code / "sub" / "run.py").write_text("import m; print(m.WORD, m.__file__)\n")
    sh.env["PYTHONPATH"] = f"{sh.env.get('PYTHONPATH', '')}:{code}"
    job_id = freeze(sh, code, "-o", "o", "--hold", "--", sys.executable, "sub/run.py")
    (code / "m.py").write_text("WORD = 'new'\n")
    sh.ok("gctl", "release", job_id)
    sh.ok("gwait", job_id)
    word, path = (code / "o").read_text().split()
    assert (word, path) == ("old", f"{shown(sh, job_id)['work_dir']}/m.py")
    told = sh.type("gsub", "--snapshot", "--hold", "--", "cat", f"{code}/m.py", cwd=code)
    assert f"{code}/m.py is used in place, not from the snapshot" in told.err
    assert sh.type("gsub", "--quiet", "--snapshot", "--hold", "--", "cat", f"{code}/m.py", cwd=code).err == ""


def test_pipeline_steps_import_from_the_copy_and_only_those_with_one(sh: Shell, code: Path) -> None:
    (code / "m.py").write_text("")
    (code / "sub" / "run.py").write_text("import m; print(m.__file__)\n")
    python = sys.executable
    (code / "p.toml").write_text(
        f'name = "p"\n[step.a]\nrun = "{python} sub/run.py"\nsnapshot = true\n'
        f'[step.b]\nrun = "{python} sub/run.py"\n'
        f'[step.c]\nrun = "cd {code} && true"\nsnapshot = true\n'
    )
    sh.env["PYTHONPATH"] = f"{sh.env.get('PYTHONPATH', '')}:{code}"
    done = sh.type("gsub", "--dag", "p.toml", "--json", "--wait", cwd=code)
    assert done.code == 0, done
    jobs = json.loads(done.out)["jobs"]
    assert sh.ok("glogs", jobs["a"]).strip() == f"{shown(sh, jobs['a'])['work_dir']}/m.py"
    assert sh.ok("glogs", jobs["b"]).strip() == f"{code}/m.py"
    assert f"{code} is used in place" in done.err


def test_a_pipeline_without_its_copy_is_not_resumed(sh: Shell, code: Path) -> None:
    (code / "p.toml").write_text(
        'name = "p"\n[step.a]\nrun = "true"\nsnapshot = true\n'
        '[step.b]\nneeds = ["a"]\nrun = "exit 1"\nsnapshot = true\n'
    )
    done = sh.type("gsub", "--dag", "p.toml", "--quiet", "--wait", cwd=code)
    assert done.code == 1
    pipeline = done.out.split()[0]
    assert sh.type("gsub", "--resume", pipeline, "--wait").code == 1, "b fails again"
    jobs = json.loads(sh.ok("gshow", "--json", pipeline))["pipelines"][0]["steps"]
    work_dir = str(shown(sh, str(next(job["id"] for job in jobs if job["step"] == "b")))["work_dir"])
    remove(str(Path(work_dir).parent))
    done = sh.type("gsub", "--resume", pipeline)
    assert (done.code, done.out) == (1, "")
    assert f"of pipeline {pipeline} started in is gone" in done.err
    assert "gsub --dag FILE" in done.err


def test_unused_copies_are_listed_and_dropped(sh: Shell, code: Path) -> None:
    waits = freeze(sh, code, "--hold", "--", "true")
    (code / "value").write_text("x" * 5000)
    freeze(sh, code, "-W", "--", "true")
    name = str(shown(sh, waits)["snapshot"])
    for about in (sh.home / "snapshots").rglob("about.json"):
        os.utime(about, (1, 1))
    lines = sh.ok("gpusched", "snapshots").splitlines()
    assert lines[0].split() == ["NAME", "SIZE", "FILES", "UNUSED", "JOBS", "CODE"]
    ours = {words[0]: words for words in map(str.split, lines) if words[-1] == str(code)}
    assert [ours[name][at] for at in (1, 2, 4)] == ["1K", "1", waits]
    (other,) = ours.keys() - {name}
    assert [ours[other][at] for at in (1, 2, 4)] == ["5K", "1", "-"]
    assert lines[-1].startswith(f"{len(lines) - 2} snapshots, ")
    done = json.loads(sh.ok("gpusched", "snapshots", "--prune", "--json"))
    assert other in done["dropped"]
    assert [(one["name"], one["jobs"]) for one in done["snapshots"] if one["root"] == str(code)] == [(name, [waits])]
    assert sh.ok("gpusched", "snapshots", "--prune").count("dropped") == 0


def test_an_unwritable_copy_is_reported_in_a_sentence(sh: Shell, code: Path) -> None:
    freeze(sh, code, "--hold", "--", "true")
    (sh.home / "snapshots").rename(sh.home / "aside")
    (sh.home / "snapshots").write_text("in the way")
    try:
        done = sh.type("gsub", "--snapshot", "--hold", "--", "true", cwd=code)
    finally:
        (sh.home / "snapshots").unlink()
        (sh.home / "aside").rename(sh.home / "snapshots")
    assert done.code == 1
    assert "error: the snapshot cannot be written: File exists" in done.err


def test_a_key_covers_the_folder_and_not_the_copy(sh: Shell, code: Path) -> None:
    first = freeze(sh, code, "--key", "s-key", "--hold", "--", "true")
    (code / "value").write_text("second\n")
    assert freeze(sh, code, "--key", "s-key", "--hold", "--", "true") == first


def test_a_batch_shares_one_copy_and_a_dry_run_makes_none(sh: Shell, code: Path, tmp_path: Path) -> None:
    (tmp_path / "lines").write_text("true\ntrue\n")
    ids = freeze(sh, code, "--hold", "--batch", str(tmp_path / "lines")).split()
    assert len({str(shown(sh, job_id)["snapshot"]) for job_id in ids}) == 1
    (code / "value").write_text("never kept\n")
    before = sorted((sh.home / "snapshots").rglob("about.json"))
    sh.ok("gsub", "--dry-run", "--snapshot", "--", "true", cwd=code)  # type: ignore[arg-type]
    assert sorted((sh.home / "snapshots").rglob("about.json")) == before


def test_a_snapshot_can_be_requested_by_environment_and_script(sh: Shell, code: Path) -> None:
    (code / "s.sh").write_text("#!/bin/sh\n#GSUB --snapshot --hold\ntrue\n")
    for env, has_one in (({}, True), ({"GSUB_SNAPSHOT": "no"}, False), ({"GSUB_SNAPSHOT": "copy"}, True)):
        job_id = sh.type("gsub", "--parsable", "s.sh", cwd=code, **env).out.strip()  # type: ignore[arg-type]
        assert (shown(sh, job_id)["snapshot"] is not None) is has_one, env


@pytest.mark.parametrize(
    ("words", "code_wanted", "says"),
    [
        (["--snapshot=tar"], 2, "'tar' is not one of auto, git, copy, no"),
        (["--snapshot=git"], 1, "cannot be read by git"),
        (["--snapshot", "-D", "/no/such/folder"], 1, "there is no folder /no/such/folder"),
        (["--snapshot", "--snapshot=no", "--hold"], 0, ""),
    ],
)
def test_other_snapshot_options_are_accepted(
    sh: Shell, code: Path, words: list[str], code_wanted: int, says: str
) -> None:
    done = sh.type("gsub", *words, "--", "true", cwd=code)
    assert (done.code, says in done.err) == (code_wanted, True), done
