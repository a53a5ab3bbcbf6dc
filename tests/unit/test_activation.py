"""Virtual and conda environments of jobs: what is set, what is undone, and what is found at submission."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpusched.cli.activation import resolve, with_scripts
from gpusched.daemon.launch.environment import activated
from gpusched.errors import Refused, UsageError

IN_CONDA = {
    "PATH": "/c/envs/old/bin:/c/condabin:/usr/bin",
    "CONDA_PREFIX": "/c/envs/old",
    "CONDA_PREFIX_1": "/c",
    "CONDA_DEFAULT_ENV": "old",
    "CONDA_PROMPT_MODIFIER": "(old) ",
    "CONDA_SHLVL": "2",
    "CONDA_EXE": "/c/bin/conda",
}
IN_VENV = {"PATH": "/v/old/bin:/usr/bin", "VIRTUAL_ENV": "/v/old", "VIRTUAL_ENV_PROMPT": "(old)", "PYTHONHOME": "/p"}


@pytest.mark.parametrize(
    ("base", "venv", "conda", "env"),
    [
        (IN_VENV, None, None, IN_VENV),
        ({}, "/v/a", None, {"PATH": "/v/a/bin:DEFAULT", "VIRTUAL_ENV": "/v/a"}),
        ({"PATH": "/usr/bin"}, "/v/a", None, {"PATH": "/v/a/bin:/usr/bin", "VIRTUAL_ENV": "/v/a"}),
        ({"PATH": "/bin:/v/a/bin"}, "/v/a", None, {"PATH": "/v/a/bin:/bin", "VIRTUAL_ENV": "/v/a"}),
        (IN_VENV, "/v/a", None, {"PATH": "/v/a/bin:/usr/bin", "VIRTUAL_ENV": "/v/a"}),
        (
            IN_CONDA,
            "/v/a",
            None,
            {"PATH": "/v/a/bin:/c/condabin:/usr/bin", "VIRTUAL_ENV": "/v/a", "CONDA_EXE": "/c/bin/conda"},
        ),
        (
            {**IN_CONDA, "PATH": "/c/envs/old/bin:/c/bin:/usr/bin"},
            None,
            "/c/envs/new",
            {
                "PATH": "/c/envs/new/bin:/usr/bin",
                "CONDA_PREFIX": "/c/envs/new",
                "CONDA_SHLVL": "1",
                "CONDA_DEFAULT_ENV": "new",
                "CONDA_EXE": "/c/bin/conda",
            },
        ),
        (
            IN_VENV,
            None,
            "/data/mine",
            {
                "PATH": "/data/mine/bin:/usr/bin",
                "CONDA_PREFIX": "/data/mine",
                "CONDA_SHLVL": "1",
                "CONDA_DEFAULT_ENV": "/data/mine",
            },
        ),
    ],
)
def test_an_environment_is_active_alone(
    base: dict[str, str], venv: str | None, conda: str | None, env: dict[str, str]
) -> None:
    from gpusched.engine.linux.as_user import DEFAULT_PATH

    found = activated(base, venv, conda)
    assert found == {name: value.replace("DEFAULT", DEFAULT_PATH) for name, value in env.items()}
    assert activated(found, venv, conda) == found


@pytest.fixture
def conda(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A conda with the environments train and tokens; the first has a script."""
    root = tmp_path / "conda"
    for name in ("train", "tokens"):
        (root / "envs" / name / "conda-meta").mkdir(parents=True)
    (root / "conda-meta").mkdir()
    (root / "envs" / "broken").mkdir()
    (root / "envs" / "train" / "etc" / "conda" / "activate.d").mkdir(parents=True)
    (root / "bin").mkdir()
    exe = root / "bin" / "conda"
    exe.write_text(
        """#!/bin/sh
[ "$1 $2" = "shell.posix activate" ] || exit 9
[ -e "$3/fails" ] && { echo EnvironmentNotWritable >&2; exit 1; }
cat <<END
export PATH='$3/bin:$PATH' MADE_BY_SCRIPT='two
lines'
unset OLD_ONE
echo hello from a script
END
"""
    )
    exe.chmod(0o755)
    for name in ("CONDA_EXE", "MAMBA_ROOT_PREFIX", "CONDA_ENVS_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PATH", f"{root / 'bin'}:/usr/bin:/bin")
    return root


@pytest.mark.parametrize(("text", "found"), [("train", "envs/train"), ("base", ""), ("PATH", "envs/tokens")])
def test_a_conda_environment_is_found_by_name_and_folder(conda: Path, text: str, found: str) -> None:
    spec = {"conda": text.replace("PATH", str(conda / "envs" / "tokens"))}
    resolve(spec)
    assert spec == {"conda": str(conda / found)}


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("trian", "did you mean train? known to conda: base, tokens, train"),
        ("broken", "known to conda: base, tokens, train"),
        ("/nowhere", "known to conda: base, tokens, train"),
    ],
)
def test_a_missing_conda_environment_is_refused_with_the_nearest(conda: Path, text: str, hint: str) -> None:
    with pytest.raises(Refused, match=f"there is no conda environment {text}") as caught:
        resolve({"conda": text})
    assert caught.value.hint == hint


def test_without_any_conda_the_folder_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PATH", "")
    for name in ("CONDA_EXE", "MAMBA_ROOT_PREFIX", "CONDA_ENVS_PATH"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(Refused) as caught:
        resolve({"conda": "train"})
    assert caught.value.hint == "give its folder: --conda /path/to/envs/NAME"
    (tmp_path / ".conda").mkdir()
    (tmp_path / "far" / "train" / "conda-meta").mkdir(parents=True)
    (tmp_path / ".conda" / "environments.txt").write_text(f"{tmp_path}/far/train\n{tmp_path}/gone\n\n")
    spec = {"conda": "train"}
    resolve(spec)
    assert spec == {"conda": str(tmp_path / "far" / "train")}


def test_what_condas_scripts_set_belongs_to_the_environment(conda: Path) -> None:
    env = {"PATH": "/usr/bin:/bin", "OLD_ONE": "1", "SHLVL": "3"}
    found = with_scripts(env, "train")
    assert found == {
        "PATH": f"{conda}/envs/train/bin:/usr/bin:/bin",
        "MADE_BY_SCRIPT": "two\nlines",
        "SHLVL": "3",
    }
    assert with_scripts(env, "tokens") is env, "there are no scripts to run"


def test_a_conda_that_fails_is_quoted(conda: Path) -> None:
    (conda / "envs" / "train" / "fails").touch()
    with pytest.raises(Refused, match="conda cannot activate .*/envs/train: EnvironmentNotWritable"):
        with_scripts({"PATH": "/usr/bin:/bin"}, "train")


def test_a_virtual_environment_is_made_absolute_or_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in (".venv", "other"):
        (tmp_path / name / "bin").mkdir(parents=True)
        (tmp_path / name / "pyvenv.cfg").touch()
        (tmp_path / name / "bin" / "python").touch(mode=0o755)
    spec = {"venv": ".venv"}
    resolve(spec)
    assert spec == {"venv": str(tmp_path / ".venv")}
    with pytest.raises(Refused, match="there is no virtual environment venv") as caught:
        resolve({"venv": "venv"})
    assert caught.value.hint == f"did you mean .venv? in {tmp_path}: .venv, other"
    with pytest.raises(Refused) as caught:
        resolve({"venv": "none/here"})
    assert caught.value.hint == "make it with: python3 -m venv none/here"
    with pytest.raises(UsageError, match="--venv and --conda were both given"):
        resolve({"venv": ".venv", "conda": "train"})
