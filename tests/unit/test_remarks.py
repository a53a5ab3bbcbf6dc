"""Notes on submissions that are probably not meant so: what is one, and what is none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gpusched.api.validate import read_submission
from gpusched.errors import UsageError
from gpusched.model.settings import Settings
from gpusched.sdk.options import missing_folder, spec_of
from gpusched.testing import NOW


def notes(batch: list[str] | None = None, **values: Any) -> tuple[str, ...]:
    given = {"argv": ["true"], **values} if "script" not in values else values
    return read_submission(given, batch, Settings(), {}, NOW).notes


CHOOSES = [
    "CUDA_VISIBLE_DEVICES=0 python train.py",
    "cd x && CUDA_VISIBLE_DEVICES=0,1 torchrun train.py",
    "export CUDA_VISIBLE_DEVICES='2'",
    'export CUDA_VISIBLE_DEVICES="GPU-1234"',
    'os.environ["CUDA_VISIBLE_DEVICES"] = "3"',
    "os.environ['CUDA_VISIBLE_DEVICES']=str(gpu)",
    'os.putenv("CUDA_VISIBLE_DEVICES", "1")',
]
LEAVES_THEM = [
    "echo $CUDA_VISIBLE_DEVICES",
    "# CUDA_VISIBLE_DEVICES=0",
    "  # os.environ['CUDA_VISIBLE_DEVICES'] = '0'",
    "CUDA_VISIBLE_DEVICES=$(echo $CUDA_VISIBLE_DEVICES | cut -d, -f1) ./a",
    'CUDA_VISIBLE_DEVICES="${devices[$SLURM_LOCALID]}" ./a',
    '[ "$CUDA_VISIBLE_DEVICES" = 0 ] && ./a',
    "[ $CUDA_VISIBLE_DEVICES=0 ]",
    "MY_CUDA_VISIBLE_DEVICES=0 ./a",
    "env CUDA_VISIBLE_DEVICES=-1 python on_cpus.py",
    "CUDA_VISIBLE_DEVICES= python on_cpus.py",
    'if os.environ["CUDA_VISIBLE_DEVICES"] == "0":',
    'os.environ["CUDA_VISIBLE_DEVICES"] = mine[int(os.environ["LOCAL_RANK"])]',
    'os.environ["CUDA_VISIBLE_DEVICES"] = ""',
    'n = len(os.environ["CUDA_VISIBLE_DEVICES"].split(","))',
]


@pytest.mark.parametrize(
    ("line", "says"), [*((line, True) for line in CHOOSES), *((line, False) for line in LEAVES_THEM)]
)
def test_a_job_that_chooses_its_gpus_is_told_so(line: str, says: bool) -> None:
    script = f"#!/bin/sh\ntrue\n{line}\n"
    for found in (
        notes(script=script, script_name="a.sh"),
        notes(script=script, script_name="wrap"),
        notes(argv=["sh", "-c", line]),
        notes([*["true"] * 3, line]),
        notes(script=script, script_name="a.sh", slurm=True),
    ):
        assert bool(found) is says
    if says:
        assert notes(script=script, script_name="a.sh")[0].startswith("line 3 of the script sets CUDA_VISIBLE_DEVICES")


def test_a_long_line_costs_no_more_than_its_length() -> None:
    script = "#!/bin/sh\n" + "CUDA_VISIBLE_DEVICES " * 20_000 + "\n" + "environ[ " * 20_000
    assert notes(script=script, script_name="a.sh") == ()


def test_what_slurm_takes_without_a_word_is_said_to_others_only() -> None:
    values: dict[str, Any] = {"begin_at": NOW - 3600, "array": "1,1,0-2", "env_named": ["CUDA_VISIBLE_DEVICES"]}
    assert [text.partition(" ")[2][:20] for text in notes(**values)] == [
        "begin that was asked",
        "array names 5 tasks,",
        "value given for CUDA",
    ]
    assert notes(**values, slurm=True) == ()
    assert notes(begin_at=NOW - 59, array="0-2,4%2", env_named=["LR"]) == ()


def test_the_python_client_names_a_missing_folder_and_refuses_bad_names(tmp_path: Path) -> None:
    assert missing_folder({"chdir": str(tmp_path)}) == missing_folder({}) == []
    (note,) = missing_folder({"chdir": f"{tmp_path}/none"})
    assert note.startswith(f"there is no folder {tmp_path}/none here; ")
    with pytest.raises(UsageError, match="extra_env has 'A B', which is not the name of a variable"):
        spec_of({"extra_env": {"A B": "1"}})
    # The rest of the environment is passed on as it is: bash exports functions under such names.
    assert spec_of({"env": {"BASH_FUNC_f%%": "() { :; }"}})["env"] == {"BASH_FUNC_f%%": "() { :; }"}
