"""How simulated GPUs are written."""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from gpusched.errors import UsageError
from gpusched.gpu.simulated import SimulatedSource, is_path
from gpusched.gpu.source import choose
from gpusched.model.cluster import GpuProcess
from gpusched.model.settings import GpuSettings


@pytest.mark.parametrize(
    ("text", "cards"),
    [
        ("4x24GiB", [("Simulated GPU", 24576)] * 4),
        ("24G", [("Simulated GPU", 24576)]),
        ("a100:80G", [("a100", 81920)]),
        ("2xA100:80GiB+2xT4:16GiB", [("A100", 81920)] * 2 + [("T4", 16384)] * 2),
        (" 1xA100 : 80GiB + 1xRTX 4090:24GiB ", [("A100", 81920), ("RTX 4090", 24576)]),
        ("2080x:8G", [("2080x", 8192)]),
        ("2X512", [("Simulated GPU", 512)] * 2),
    ],
)
def test_groups_of_gpus_are_parsed(text: str, cards: list[tuple[str, int]]) -> None:
    gpus = SimulatedSource(text).read().gpus
    assert [(gpu.name, gpu.vram_total_mib) for gpu in gpus] == cards
    assert [gpu.uuid for gpu in gpus] == [f"GPU-SIM-00000000-0000-0000-0000-{n:012d}" for n in range(len(cards))]
    assert all(gpu.vram_used_mib == 0 and gpu.vram_reserved_mib == 0 and gpu.processes == () for gpu in gpus)


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("24GiB", [None]),
        ("3x24GiB", [0, 0, 0]),
        ("2xA100:80GiB+1xT4:16GiB+2xT4:16GiB", [0, 0, None, 3, 3]),
        ("8x80GiB/4", [0, 0, 0, 0, 4, 4, 4, 4]),
        ("2x80G/1", [None, None]),
        ("1xT4:16G+4xA100:80GB/2", [None, 1, 1, 3, 3]),
        ("2x8192/2+2x8192", [0, 0, 2, 2]),
    ],
)
def test_gpus_of_a_group_are_linked(text: str, groups: list[int | None]) -> None:
    assert [gpu.link_group for gpu in SimulatedSource(text).read().gpus] == groups


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("8x80GiB/4", False),
        ("2xA100:80G/2+1xT4:16G", False),
        ("gpus.json", True),
        ("./gpus", True),
        ("/tmp/80GiB/4", True),
        ("labs/gpus", True),
        ("80G/4/gpus", True),
    ],
)
def test_a_slash_makes_a_path_unless_it_belongs_to_a_group(text: str, expected: bool) -> None:
    assert is_path(text) is expected


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("many", "'many' is not a size"),
        ("4x", "not a size"),
        ("x24GiB", "not a size"),
        ("2xA100", "'A100' is not a size"),
        ("4x24GiB+", "'' is not COUNTxNAME:SIZE"),
        ("0x24GiB", "must be from 1 to 1024"),
        ("1000x1G+25x1G", "must be from 1 to 1024"),
        ("99999999999x1G", "must be from 1 to 1024"),
        ("4x0GiB", "out of range"),
        ("a:b:8G", "is not COUNTxNAME:SIZE"),
        ("4x24GiB/3", "4 GPUs cannot be linked by 3"),
        ("4x24GiB/0", "cannot be linked by 0"),
        ("2x24GiB/4", "2 GPUs cannot be linked by 4"),
        ("2xA100:80G/2+2x16G/9999999999", "cannot be linked"),
    ],
)
def test_an_unreadable_text_is_quoted_with_an_example(text: str, why: str) -> None:
    with pytest.raises(UsageError) as caught:
        SimulatedSource(text)
    assert repr(text) in caught.value.message
    assert why in caught.value.message
    assert "4x24GiB" in caught.value.hint


def write(path: Path, document: Any) -> str:
    """Put a description in place at once, as an editor would."""
    draft = path.with_suffix(".new")
    draft.write_text(document if isinstance(document, str) else json.dumps(document))
    os.replace(draft, path)
    return str(path)


def test_a_file_describes_every_field(tmp_path: Path) -> None:
    entry = {
        "name": "H200",
        "vram": "141GiB",
        "uuid": "GPU-mine",
        "vram_used": "4GiB",
        "utilisation": 0.5,
        "temperature_c": 60,
        "power_w": 400,
        "processes": [{"pid": 7, "vram": "3GiB", "user": "eva", "name": "python", "started_at": 12.5}],
        "mig_enabled": True,
        "compute_mode": 3,
        "display_active": True,
        "unified_memory": True,
        "link_group": 3,
        "numa": 1,
    }
    document = {
        "gpus": [entry, {"vram": 100, "processes": [{"pid": 8, "vram": 30}, {"pid": 9}]}],
        "driver_version": "1.2",
    }
    reading = SimulatedSource(write(tmp_path / "g.json", document)).read()
    full, small = reading.gpus
    assert (full.uuid, full.name, full.vram_total_mib, full.vram_used_mib) == ("GPU-mine", "H200", 144384, 4096)
    assert (full.utilisation, full.temperature_c, full.power_w) == (0.5, 60, 400)
    assert full.processes == (GpuProcess(7, 3072, "eva", 12.5, "python"),)
    assert (full.mig_enabled, full.compute_mode, full.display_active, full.unified_memory) == (True, 3, True, True)
    assert (full.link_group, full.numa, small.link_group, small.numa) == (3, 1, None, None)
    assert (small.vram_used_mib, small.processes) == (30, (GpuProcess(8, 30), GpuProcess(9, None)))
    assert reading.driver_version == "1.2"


@pytest.mark.parametrize(
    ("document", "why"),
    [
        ("{", "is not JSON"),
        ([], "the file is not an object with keys"),
        ({"gpus": 3}, "'gpus' of the file is 3, not a list"),
        ({"gpus": [3]}, "GPU 0 is not an object"),
        ({"gpus": [{"vram": "much"}]}, "'much' is not a size"),
        ({"gpus": [{"vram": True}]}, "'vram' of GPU 0 is True, not a size such as 24GiB"),
        ({"gpus": [{"vram": 8, "vam": 1}]}, "GPU 0 has the unknown key 'vam'"),
        ({"gpus": [{"vram": 8, "lost": 1}]}, "'lost' of GPU 0 is 1, not true or false"),
        ({"gpus": [{"vram": 8, "utilisation": -1}]}, "'utilisation' of GPU 0 is -1, not a number from 0"),
        ({"gpus": [{"vram": 8, "processes": [{"vram": 1}]}]}, "GPU 0, process 0 has no pid"),
        ({"gpus": [{"vram": 8, "uuid": "a"}, {"vram": 8, "uuid": "a"}]}, "the UUID 'a' is there twice"),
        ({"gpus": [{"vram": 8, "numa": 0.5}]}, "'numa' of GPU 0 is 0.5, not a whole number"),
        ({"gpus": [], "speed": 1}, "the file has the unknown key 'speed'"),
        ({"gpus": [{"vram": 8}] * 1025}, "at most 1024"),
    ],
)
def test_an_invalid_file_says_where(tmp_path: Path, document: Any, why: str) -> None:
    path = write(tmp_path / "g.json", document)
    with pytest.raises(UsageError) as caught:
        SimulatedSource(path)
    assert why in caught.value.message
    assert path in caught.value.message


def test_a_missing_file_is_named() -> None:
    with pytest.raises(UsageError, match=r"'/nowhere/g\.json' cannot be read: No such file"):
        SimulatedSource("/nowhere/g.json")


def test_a_file_that_breaks_later_is_an_error_over_the_last_good_state(tmp_path: Path) -> None:
    path = write(tmp_path / "g.json", {"gpus": [{"vram": 100}]})
    source = SimulatedSource(path)
    write(tmp_path / "g.json", "{")
    broken = source.read()
    assert broken.error is not None
    assert "is not JSON" in broken.error
    assert len(broken.gpus) == 1
    write(tmp_path / "g.json", {"gpus": [{"vram": 100}, {"vram": 200}]})
    mended = source.read()
    assert mended.error is None
    assert len(mended.gpus) == 2
    (tmp_path / "g.json").unlink()
    assert "cannot be read" in (source.read().error or "")


def test_an_unreadable_gpu_keeps_its_name_and_measures_nothing(tmp_path: Path) -> None:
    entry = {"name": "T4", "vram": 100, "error": "it must be reset", "vram_used": 50}
    (gpu,) = SimulatedSource(write(tmp_path / "g.json", {"gpus": [entry]})).read().gpus
    assert (gpu.name, gpu.error, gpu.is_lost, gpu.vram_used_mib, gpu.vram_total_mib) == (
        "T4",
        "it must be reset",
        False,
        None,
        None,
    )


def test_a_slow_driver_can_be_simulated(tmp_path: Path) -> None:
    slept: list[float] = []
    path = write(tmp_path / "g.json", {"gpus": [], "read_delay_s": 2.5})
    SimulatedSource(path, sleep=slept.append).read()
    assert slept == [2.5]


def test_a_reading_says_that_it_is_simulated() -> None:
    before = time.time()
    reading = SimulatedSource("2x8G").read()
    assert before <= reading.at <= time.time()
    assert reading.source == "simulated"
    assert reading.notes == ("the GPUs are simulated: 2x8G",)


# --- which source ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "fake", "environ", "kind", "described"),
    [
        ("auto", None, {}, "auto", ""),
        ("auto", "1x8G", {}, "simulated", "1x8G"),
        ("auto", "1x8G", {"GPUSCHED_FAKE_GPUS": "2x8G"}, "simulated", "2x8G"),
        ("auto", None, {"GPUSCHED_FAKE_GPUS": " "}, "auto", ""),
        ("simulated", None, {"GPUSCHED_FAKE_GPUS": "2x8G"}, "simulated", "2x8G"),
        ("nvml", "1x8G", {}, "nvml", ""),
        ("none", None, {"GPUSCHED_FAKE_GPUS": "2x8G"}, "none", ""),
    ],
)
def test_the_source_is_chosen(
    source: str, fake: str | None, environ: dict[str, str], kind: str, described: str
) -> None:
    choice = choose(GpuSettings(source=source, fake=fake), environ)
    assert (choice.kind, choice.fake) == (kind, described)
    is_unused = kind != "simulated" and bool(fake or environ.get("GPUSCHED_FAKE_GPUS", "").strip())
    assert (choice.note is not None) == is_unused


def test_a_relative_path_is_made_absolute(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert choose(GpuSettings(fake="g.json"), {}).fake == str(tmp_path / "g.json")


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        (GpuSettings(source="magic"), "'magic' is unknown"),
        (GpuSettings(source="simulated"), "configured, but not described"),
    ],
)
def test_an_invalid_choice_is_refused(settings: GpuSettings, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        choose(settings, {})


def test_a_file_may_name_jobs_instead_of_processes(tmp_path: Path) -> None:
    path, socket = tmp_path / "g.json", str(tmp_path / "api.sock")
    entry = {"vram": "24GiB", "processes": [{"job": 123456, "vram": "3GiB"}, {"pid": 8, "vram": "1GiB", "user": "eva"}]}
    source = SimulatedSource(write(path, {"gpus": [entry]}), socket=socket)

    def pids() -> list[int]:
        (gpu,) = source.read().gpus
        assert gpu.vram_used_mib == 1024 * (1 if len(gpu.processes or ()) == 1 else 4)
        return [process.pid for process in gpu.processes or ()]

    assert pids() == [8]
    env = {**os.environ, "GPUSCHED_JOB_ID": "123456"}
    with (
        subprocess.Popen(["sleep", "1000"], env={**env, "GPUSCHED_SOCKET": "/of/another"}) as other,
        subprocess.Popen(["sleep", "1000"], env={**env, "GPUSCHED_SOCKET": socket}) as job,
    ):
        try:
            assert pids() == [job.pid, 8]
        finally:
            other.kill()
            job.kill()
    assert pids() == [8]


@pytest.mark.parametrize(
    ("process", "what"), [({"vram": 1}, "has no pid"), ({"pid": 7, "job": 1}, "has both pid and job")]
)
def test_a_process_has_a_pid_or_a_job(tmp_path: Path, process: dict[str, int], what: str) -> None:
    with pytest.raises(UsageError, match=what):
        SimulatedSource(write(tmp_path / "g.json", {"gpus": [{"vram": 100, "processes": [process]}]}))
