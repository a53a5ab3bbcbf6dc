"""What a snapshot of a folder holds, what is refused, that equal trees are one copy, and when copies go."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpusched.errors import Refused
from gpusched.snapshots import snapshot
from gpusched.snapshots.file_list import list_tree
from gpusched.snapshots.snapshot import CodeSnapshot, SnapshotLimits, freeze, remove, renew, sweep
from gpusched.snapshots.submission import moved, ways_out

LIMITS = SnapshotLimits(mib=1, files=50, keep_days=30, total_mib=100)
needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")


@pytest.fixture
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("GPUSCHED_HOME", str(tmp_path / "home"))
    # No git work tree may be found above, and no setting of a person counts.
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", "/dev/null")
    monkeypatch.setenv("GIT_CONFIG_SYSTEM", "/dev/null")
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "a.py").write_text("1")
    yield tmp_path / "code"
    remove(str(tmp_path / "home"))


def git(folder: Path, *words: str) -> str:
    who = ["-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "protocol.file.allow=always"]
    return subprocess.run(["git", *who, *words], cwd=folder, check=True, capture_output=True, text=True).stdout


def committed(folder: Path) -> Path:
    git(folder, "init", "-q", ".")
    git(folder, "add", ".")
    git(folder, "commit", "-qm", "first")
    return folder


def frozen(
    folder: Path, mode: str = "auto", limits: SnapshotLimits = LIMITS, needed: frozenset[str] = frozenset()
) -> CodeSnapshot:
    return freeze(str(folder), mode, "/the/socket", limits, lambda: set(needed))


def tree_of(found: CodeSnapshot) -> dict[str, str]:
    """Files with their content, links as `-> target`."""
    top = Path(found.work_dir)
    entries = {}
    for path in sorted(top.rglob("*")):
        if path.is_symlink():
            entries[str(path.relative_to(top))] = f"-> {os.readlink(path)}"
        elif path.is_file():
            entries[str(path.relative_to(top))] = path.read_text()
    return entries


# --- a plain folder -----------------------------------------------------------------------------------


def test_a_plain_folder_is_copied_whole_and_the_copy_does_not_follow_edits(code: Path) -> None:
    (code / "pkg").mkdir()
    (code / "pkg" / "run").write_text("x")
    (code / "pkg" / "run").chmod(0o755)
    found = frozen(code)
    with (code / "a.py").open("r+") as file:  # in place, which a hard link would show
        file.write("2")
    (code / "pkg" / "run").unlink()
    assert tree_of(found) == {"a.py": "1", "pkg/run": "x"}
    assert os.stat(f"{found.work_dir}/pkg/run").st_mode & 0o777 == 0o555
    assert os.stat(f"{found.work_dir}/a.py").st_mode & 0o777 == 0o444
    assert os.stat(found.work_dir).st_mode & 0o777 == 0o555
    assert (found.about["commit"], found.about["is_dirty"], found.about["files"]) == (None, None, 2)


def test_the_folder_asked_for_is_found_inside_the_copy(code: Path) -> None:
    (code / "sub").mkdir()
    (code / "sub" / "b").write_text("b")
    assert tree_of(frozen(code / "sub")) == {"b": "b"}


def test_a_hundred_snapshots_of_one_tree_are_one_copy_even_concurrently(code: Path, tmp_path: Path) -> None:
    names: list[str] = []
    threads = [threading.Thread(target=lambda: names.extend(frozen(code).name for _ in range(25))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(names) == 100
    assert len(set(names)) == 1
    (folder,) = (tmp_path / "home" / "snapshots").iterdir()
    assert {path.stat().st_mode & 0o777 for path in (folder, folder.parent, tmp_path / "home")} == {0o700}
    assert sorted(os.listdir(folder)) == sorted([names[0], "lock"])


def test_an_equal_tree_is_not_copied_again(code: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fifty submissions of one large tree would write it fifty times."""
    first = frozen(code)

    def never(*_: object) -> None:
        raise AssertionError("copied")

    monkeypatch.setattr(snapshot, "copy_content", never)
    assert frozen(code).name == first.name
    (code / "a.py").write_text("2")
    with pytest.raises(AssertionError, match="copied"):
        frozen(code)


def test_any_change_makes_another_snapshot(code: Path) -> None:
    names = [frozen(code).name]
    for change in (
        lambda: (code / "a.py").write_text("2"),
        lambda: (code / "a.py").chmod(0o755),
        lambda: (code / "a.py").rename(code / "b.py"),
        lambda: (code / "link").symlink_to("b.py"),
    ):
        change()
        names.append(frozen(code).name)
    assert len(set(names)) == len(names)


def test_names_with_odd_bytes_survive(code: Path) -> None:
    odd = os.fsencode(code) + b"/\xff\n tab\t"
    with open(odd, "wb") as file:
        file.write(b"\0")
    found = frozen(code)
    assert b"\xff\n tab\t" in os.listdir(os.fsencode(found.work_dir))


def test_links_are_kept_and_outside_targets_resolve(code: Path, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (code / "inside").symlink_to("a.py")
    (code / "out").symlink_to("../data")
    (code / "absolute").symlink_to("/dev/null")
    (code / "broken").symlink_to("nowhere")
    assert tree_of(frozen(code)) == {
        "a.py": "1",
        "inside": "-> a.py",
        "out": f"-> {tmp_path}/data",
        "absolute": "-> /dev/null",
        "broken": "-> nowhere",
    }


def test_sockets_and_pipes_are_left_out_and_named(code: Path) -> None:
    os.mkfifo(code / "pipe")
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(code / "sock"))
        found = frozen(code)
    assert tree_of(found) == {"a.py": "1"}
    assert found.about["left_out"] == ["pipe", "sock"]


def test_ignored_files_are_linked_to_their_original_place(code: Path) -> None:
    (code / "data").mkdir()
    (code / "data" / "big").write_text("d" * 2_000_000)
    (code / "model.bin").write_text("m" * 2_000_000)
    (code / ".gpuschedignore").write_text("# large\ndata/\n*.bin\n")
    found = tree_of(frozen(code))
    assert found["data"] == f"-> {code}/data"
    assert found["model.bin"] == f"-> {code}/model.bin"


def test_logs_and_compiled_files_do_not_make_another_snapshot(code: Path) -> None:
    before = frozen(code).name
    for name in ("gpusched-7.out", "gpusched-7_3.out", "gpusched-7.out.2"):
        (code / name).write_text("log")
    (code / "__pycache__").mkdir()
    (code / "__pycache__" / "a.pyc").write_text("x")
    assert frozen(code).name == before


@pytest.mark.parametrize(
    ("sizes", "says"),
    [
        (
            {"data/x": 2_000_000, "data/y": 10, "w.bin": 500_000},
            ["more than the 1M of [limit] snapshot_mib", "data/ (", "w.bin ("],
        ),
        ({f"many/{n}": 0 for n in range(60)}, ["61 files, more than the 50 of [limit] snapshot_files", "many/ (60)"]),
    ],
)
def test_an_oversized_tree_is_refused_with_its_largest_entries(
    code: Path, sizes: dict[str, int], says: list[str]
) -> None:
    for name, size in sizes.items():
        (code / name).parent.mkdir(exist_ok=True)
        (code / name).write_bytes(b"x" * size)
    with pytest.raises(Refused) as caught:
        frozen(code)
    for words in says:
        assert words in caught.value.message
    assert ".gpuschedignore" in caught.value.hint


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_an_unreadable_file_is_named_and_nothing_is_left_behind(code: Path, tmp_path: Path) -> None:
    (code / "secret").write_text("s")
    (code / "secret").chmod(0)
    with pytest.raises(Refused, match="secret cannot be read"):
        frozen(code)
    (folder,) = (tmp_path / "home" / "snapshots").iterdir()
    assert os.listdir(folder) == ["lock"]


def test_files_of_the_scheduler_are_excluded(code: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUSCHED_HOME", str(code / "home"))
    frozen(code)
    with pytest.raises(Refused, match="the scheduler's own files"):
        frozen(code)
    with pytest.raises(Refused, match="snapshot of /"):
        frozen(Path("/"))
    remove(str(code / "home"))


def test_empty_folders_are_copied(code: Path) -> None:
    (code / "runs" / "old").mkdir(parents=True)
    found = frozen(code)
    assert os.path.isdir(f"{found.work_dir}/runs/old")
    (code / "runs" / "old").rmdir()
    assert frozen(code).name != found.name


def test_files_removed_during_the_copy_are_skipped(code: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (code / ".a.py.swp").write_text("editor")

    def check(listing: snapshot.Listing, _: SnapshotLimits) -> None:
        (code / ".a.py.swp").unlink()

    monkeypatch.setattr(snapshot, "_check_size", check)
    found = frozen(code)
    assert (tree_of(found), found.about["files"], found.about["bytes"]) == ({"a.py": "1"}, 1, 1)


def test_files_written_during_the_copy_are_copied_again(code: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Saved in place by an editor: the copy is not the first half of one and the second half of the other."""
    content, left = snapshot.copy_content, [1]

    def slow(reader: int, writer: int, size: int) -> None:
        content(reader, writer, size)
        if left.pop() if left else 0:
            (code / "a.py").write_text("second, longer")

    monkeypatch.setattr(snapshot, "copy_content", slow)
    found = frozen(code)
    assert (tree_of(found), found.about["unsettled"]) == ({"a.py": "second, longer"}, [])


def test_a_constantly_growing_log_is_truncated_and_named(code: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = snapshot.copy_content

    def grow(reader: int, writer: int, size: int) -> None:
        with (code / "train.log").open("a") as log:
            log.write("more\n")
        content(reader, writer, size)

    (code / "train.log").write_text("begin\n")
    (code / "a.py").unlink()
    monkeypatch.setattr(snapshot, "copy_content", grow)
    found = frozen(code)
    assert found.about["unsettled"] == ["train.log"]
    assert tree_of(found)["train.log"].startswith("begin\n")


# --- what leads out of it -------------------------------------------------------------------------------


def test_pythonpath_points_into_the_copy(code: Path, tmp_path: Path) -> None:
    (code / "src").mkdir()
    (code / "src" / "m.py").write_text("")
    (code / "data").mkdir()
    (code / ".gpuschedignore").write_text("data\n")
    (tmp_path / "alias").symlink_to(code)
    tree = frozen(code).work_dir
    path = f"{code}:{code}/src/:{tmp_path}/alias/src::src:/nowhere:{code}/data:{code}-not"
    env = moved({"PYTHONPATH": path, "PATH": str(code)}, str(code), tree)
    assert env["PATH"] == str(code)
    assert env["PYTHONPATH"] == f"{tree}:{tree}/src:{tree}/src::src:/nowhere:{code}/data:{code}-not"


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        (
            {"argv": ["python", "CODE/a.py", "--out", "CODE/data/x", "--log", "CODE/new"]},
            ["CODE/a.py is used in place"],
        ),
        ({"script": "#!/bin/sh\ncd CODE && python a.py >CODE/data/log\n"}, ["CODE is used in place"]),
        ({"script": "source 'CODE/a.py'; ls CODE-old CODE/data"}, ["CODE/a.py is used in place"]),
        ({"script": "cd ~/code; python ~/code/a.py"}, ["~/code is used", "~/code/a.py is used"]),
        ({"script": 'pushd "$HOME/code"'}, ["$HOME/code is used"]),
        ({"script": 'cd "$SLURM_SUBMIT_DIR"\npython a.py'}, ["the script changes to $SLURM_SUBMIT_DIR, out of the"]),
        ({"script": "cd ${GPUSCHED_SUBMIT_DIR}/sub"}, ["the script changes to $GPUSCHED_SUBMIT_DIR"]),
        ({"script": "python a.py > $SLURM_SUBMIT_DIR/out", "argv": ["a.py", "/dev/null", "/", "/\0"]}, []),
    ],
)
def test_files_used_from_the_original_tree_are_reported(
    code: Path, monkeypatch: pytest.MonkeyPatch, spec: dict[str, object], says: list[str]
) -> None:
    (code / "data").mkdir()
    (code / "data" / "x").write_text("")
    (code / ".gpuschedignore").write_text("data\n")
    monkeypatch.setenv("HOME", str(code.parent))

    def named(value: object) -> object:
        return [named(one) for one in value] if isinstance(value, list) else str(value).replace("CODE", str(code))

    found = frozen(code)
    told = ways_out({name: named(value) for name, value in spec.items()}, str(code), found.work_dir)
    assert len(told) == len(says)
    for text, words in zip(told, says, strict=True):
        assert text.startswith(str(named(words)))


# --- git ------------------------------------------------------------------------------------------------


@needs_git
def test_a_work_tree_is_copied_with_changes_and_new_but_not_ignored_files(code: Path) -> None:
    (code / ".gitignore").write_text("out/\n")
    (code / "gone.py").write_text("x")
    (code / "sub").mkdir()
    (code / "sub" / "s.py").write_text("s")
    committed(code)
    clean = frozen(code)
    assert (clean.about["is_dirty"], clean.about["commit"]) == (False, git(code, "rev-parse", "HEAD").strip())
    (code / "a.py").write_text("changed")
    (code / "gone.py").unlink()
    (code / "new.py").write_text("new")
    (code / "out").mkdir()
    (code / "out" / "big").write_text("b" * 3_000_000)
    found = frozen(code / "sub")
    assert found.work_dir.endswith("/tree/sub")
    assert found.about["is_dirty"] is True
    top = Path(found.work_dir).parent
    assert {path.name for path in top.iterdir()} == {".gitignore", "a.py", "new.py", "sub", "out"}
    assert (top / "a.py").read_text() == "changed"
    assert os.readlink(top / "out") == f"{code}/out"
    assert "+changed" in (top.parent / "changes.patch").read_text()


@needs_git
def test_a_work_tree_without_commits_is_copied(code: Path) -> None:
    git(code, "init", "-q", ".")
    found = frozen(code)
    assert tree_of(found) == {"a.py": "1"}
    assert (found.about["commit"], found.about["is_dirty"]) == (None, True)


@needs_git
def test_submodules_and_repositories_inside_are_kept_too(code: Path, tmp_path: Path) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "l.py").write_text("l")
    committed(tmp_path / "lib")
    committed(code)
    git(code, "submodule", "--quiet", "add", str(tmp_path / "lib"), "lib")
    git(code, "commit", "-qm", "second")
    (code / "nested").mkdir()
    (code / "nested" / "n.py").write_text("n")
    committed(code / "nested")
    (code / "lib" / "l.py").write_text("edited")
    found = frozen(code)
    files = tree_of(found)
    assert (files["lib/l.py"], files["nested/n.py"]) == ("edited", "n")
    assert not any(name.startswith(".git/") or "/.git" in name for name in files if name != ".gitmodules")
    known = {one["path"]: one["is_dirty"] for one in found.about["repositories"]}
    assert known == {".": True, "lib": True, "nested": False}


@needs_git
def test_tracked_files_named_as_data_are_linked_by_their_folder(code: Path) -> None:
    (code / "data").mkdir()
    for n in range(3):
        (code / "data" / str(n)).write_text("d")
    (code / ".gpuschedignore").write_text("data\n")
    committed(code)
    assert tree_of(frozen(code))["data"] == f"-> {code}/data"


@needs_git
def test_a_plain_copy_of_a_work_tree_leaves_gits_own_folder_out(code: Path) -> None:
    committed(code)
    assert tree_of(frozen(code, "copy")) == {"a.py": "1"}


@needs_git
def test_git_is_required_only_in_a_work_tree(code: Path) -> None:
    with pytest.raises(Refused, match="cannot be read by git") as caught:
        frozen(code, "git")
    assert "--snapshot=copy" in caught.value.hint
    assert list_tree(os.fsencode(code), "auto").repositories == []


@needs_git
def test_an_empty_folder_and_a_missing_submodule_are_folders_of_the_copy(code: Path, tmp_path: Path) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "l.py").write_text("l")
    committed(tmp_path / "lib")
    committed(code)
    git(code, "submodule", "--quiet", "add", str(tmp_path / "lib"), "lib")
    git(code, "commit", "-qm", "second")
    git(tmp_path, "clone", "-q", str(code), "clone")
    (tmp_path / "clone" / "new").mkdir()
    first = frozen(tmp_path / "clone")
    assert os.path.isdir(f"{first.work_dir}/lib")
    found = frozen(tmp_path / "clone" / "new")
    assert os.path.isdir(found.work_dir), "the job starts there"
    assert found.name != first.name


@needs_git
def test_the_repository_is_that_of_the_folder_even_in_a_git_hook(
    code: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """git sets these for hooks, and then asks about the hook's repository wherever it is called."""
    committed(code)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "o.py").write_text("o")
    committed(tmp_path / "other")
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "other" / ".git"))
    monkeypatch.setenv("GIT_WORK_TREE", str(tmp_path / "other"))
    monkeypatch.setenv("GIT_INDEX_FILE", str(tmp_path / "other" / ".git" / "index"))
    assert tree_of(frozen(code)) == {"a.py": "1"}


@needs_git
def test_a_missing_git_filter_drops_the_patch_and_keeps_the_snapshot(code: Path) -> None:
    (code / ".gitattributes").write_text("*.bin filter=lfs\n")
    (code / "w.bin").write_text("version https://git-lfs.github.com/spec/v1")
    committed(code)
    git(code, "config", "filter.lfs.clean", "git-lfs-is-not-here clean")
    git(code, "config", "filter.lfs.required", "true")
    (code / "w.bin").write_text("weights")
    found = frozen(code)
    assert tree_of(found)["w.bin"] == "weights"
    assert found.about["is_dirty"] is True
    patch = Path(found.work_dir).parent / "changes.patch"
    assert patch.read_text() == "# git could not tell the changes in .\n"


@needs_git
def test_compiled_files_are_excluded_even_if_not_ignored(code: Path) -> None:
    committed(code)
    before = frozen(code)
    (code / "pkg" / "__pycache__").mkdir(parents=True)
    (code / "pkg" / "__pycache__" / "m.pyc").write_text("x")
    after = frozen(code)
    assert (after.name, after.about["is_dirty"]) == (before.name, False)


@needs_git
def test_a_large_tree_is_refused_before_its_diff_is_computed(code: Path) -> None:
    committed(code)
    git(code, "config", "filter.slow.clean", f"touch {code}/.git/looked; cat")
    (code / ".gitattributes").write_text("a.py filter=slow\n")
    (code / "a.py").write_bytes(b"x" * 3_000_000)
    with pytest.raises(Refused, match=r"a\.py"):
        frozen(code)
    assert not (code / ".git" / "looked").exists()
    (code / "a.py").write_bytes(b"x")
    frozen(code)
    assert (code / ".git" / "looked").exists(), "git diff would have said so"


# --- dropping --------------------------------------------------------------------------------------------


def age(found: CodeSnapshot, days: float) -> None:
    then = time.time() - days * 86400
    os.utime(Path(found.work_dir).parent / "about.json", (then, then))


def test_old_snapshots_are_removed_unless_a_job_needs_them(code: Path) -> None:
    made = []
    for text in "xyz":
        (code / "a.py").write_text(text)
        made.append(frozen(code))
    age(made[0], 31)
    age(made[1], 31)
    age(made[2], 29)
    (code / "a.py").write_text("now")
    frozen(code, needed=frozenset({made[1].name}))
    assert [os.path.exists(found.work_dir) for found in made] == [False, True, True]
    # Submitting with one again makes it young.
    (code / "a.py").write_text("y")
    assert frozen(code, needed=frozenset({made[1].name})).name == made[1].name
    (code / "a.py").write_text("later")
    frozen(code)
    assert os.path.exists(made[1].work_dir)


def test_the_daemon_is_not_queried_while_no_snapshot_is_old(code: Path) -> None:
    def ask() -> set[str]:
        raise AssertionError("asked")

    for text in "ab":
        (code / "a.py").write_text(text)
        freeze(str(code), "auto", "/the/socket", LIMITS, ask)


def test_partial_copies_of_killed_processes_are_swept(code: Path, tmp_path: Path) -> None:
    found = frozen(code)
    half = Path(found.work_dir).parents[1] / ".new-x"
    (half / "tree").mkdir(parents=True)
    os.utime(half, (1, 1))
    frozen(code)
    assert not half.exists()


def test_the_least_recently_used_are_removed_first_when_space_is_short(code: Path) -> None:
    made = []
    for n in range(4):
        (code / "a.py").write_bytes(bytes([n]) * 400_000)
        made.append(frozen(code))
        age(made[-1], 2 - 0.1 * n)
    small = SnapshotLimits(mib=1, files=50, keep_days=30, total_mib=1)
    (code / "a.py").write_bytes(b"n" * 400_000)
    frozen(code, limits=small, needed=frozenset({made[1].name}))
    assert [os.path.exists(found.work_dir) for found in made] == [False, True, False, False]


def test_a_snapshot_chosen_just_now_is_kept(code: Path) -> None:
    first = frozen(code)
    (code / "a.py").write_text("2")
    none = SnapshotLimits(mib=1, files=50, keep_days=0, total_mib=0)
    frozen(code, limits=none)
    assert os.path.isdir(first.work_dir)
    age(first, 1)
    frozen(code, limits=none)
    assert not os.path.exists(first.work_dir)


def test_a_repeat_refreshes_its_snapshot(code: Path) -> None:
    found = frozen(code)
    age(found, 40)
    home = str(Path(found.work_dir).parents[1])
    assert renew(found.work_dir, found.name)
    assert sweep(home, set) == []
    age(found, 40)
    assert sweep(home, lambda: {found.name}) == []
    assert sweep(home, set) == [found.name]
    assert not renew(found.work_dir, found.name)
    assert not renew("/no/such/place", found.name)
    assert sweep("/no/such/place", set) == []
