"""Commands that root types in a folder, or with a file, that somebody else may change."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from people import NEEDS_ROOT
from support import wait_until

from gpusched import client
from gpusched.cli import doctor, doctor_machine


@pytest.mark.parametrize("look", [doctor._nvml_module, doctor_machine.nvml])
def test_the_doctor_runs_no_module_of_the_folder_where_it_is_asked(
    look: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    proof = tmp_path / "was run"
    (tmp_path / "pynvml.py").write_text(f"open({str(proof)!r}, 'w').close()\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(doctor_machine, "nvidia_signs", lambda: True)
    assert callable(look)
    look()
    assert not proof.exists()


def test_a_daemon_is_not_started_from_the_folder_where_somebody_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    proof, home = tmp_path / "was run", tmp_path / "home"
    there = tmp_path / "there"
    there.mkdir()
    for name in ("asyncio", "gpusched", "runpy"):
        (there / f"{name}.py").write_text(f"open({str(proof)!r}, 'w').close()\nraise SystemExit(3)\n")
    monkeypatch.chdir(there)
    monkeypatch.setenv("GPUSCHED_HOME", str(home))
    monkeypatch.setenv("PYTHONPATH", os.path.dirname(os.path.dirname(os.path.abspath(client.__file__))))
    monkeypatch.setenv("GPUSCHED_FAKE_GPUS", "1x8GiB")
    client.start_daemon()
    with client.connect() as found:
        found.call("POST", "/v1/shutdown", {})
    wait_until(lambda: not (home / "run" / "api.sock").exists(), 30, "the daemon to end")
    assert not proof.exists()
