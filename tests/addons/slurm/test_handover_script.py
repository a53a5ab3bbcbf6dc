"""The script of a job that is handed over, run with stand-ins for srun and scontrol."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from gpusched.addons.slurm.handover.job_script import RECORD, job_script
from gpusched.model.job import Notice, Run
from gpusched.model.states import RunState
from gpusched.model.value import replace
from gpusched.testing import NOW, job

SRUN = """#!/bin/sh
# As srun --kill-on-bad-exit: ends the other tasks, and returns the highest code.
while case $1 in --*) true;; *) false;; esac; do shift; done
for task in 0 1; do
  SLURM_PROCID=$task SLURM_NODEID=$task SLURM_NNODES=2 SLURMD_NODENAME=n$((task + 1)) setsid "$@" &
  eval "task$task=$!"
done
wait "$task1"; second=$?
[ "$second" = 0 ] || kill -TERM "-$task0"
wait "$task0"; first=$?
exit $((first > second ? first : second))
"""


def run(tmp_path: Path, text: str, notice: Notice | None = None) -> tuple[int, str, str]:
    """Run a command on two nodes: exit code, errors, and the record's result."""
    for name, program in (("srun", SRUN), ("scontrol", "#!/bin/sh\necho n1\n")):
        (tmp_path / name).write_text(program)
        (tmp_path / name).chmod(0o755)
    made = job(1)
    launch = replace(made.spec.launch, argv=("sh", "-c", text), work_dir=str(tmp_path), notice=notice)
    made = replace(made, spec=replace(made.spec, launch=launch, request=replace(made.spec.request, nodes=2)))
    attempt = Run(job_id=1, number=1, state=RunState.STARTING, node="slurm", boot_id="", intent_at=NOW)
    path = f"{tmp_path}:{os.environ['PATH']}"
    script = job_script(made, attempt, None, None, {"PATH": path}).decode().replace(RECORD, f"'{tmp_path}/record'")
    env = {"PATH": path, "SLURM_JOB_ID": "88", "SLURM_JOB_NODELIST": "n[1-2]", "LC_ALL": "C", "TZ": "X"}
    done = subprocess.run(["sh", "-s"], input=script, env=env, capture_output=True, text=True, check=False, timeout=40)
    return done.returncode, done.stderr, (tmp_path / "record" / "result").read_text()


@pytest.mark.parametrize("notice", [None, Notice(12, 60, False)])
def test_the_first_rank_that_fails_decides_the_code(tmp_path: Path, notice: Notice | None) -> None:
    # The stand-in kills once, so the other rank has to be there by then.
    up = tmp_path / "up"
    text = f'[ "$NODE_RANK" = 1 ] || {{ touch {up}; exec sleep 600; }}; until [ -e {up} ]; do sleep 0.01; done; exit 6'
    code, errors, result = run(tmp_path, text, notice)
    assert (code, "exit=6\n" in result) == (6, True)
    assert "rank 1 on n2 was the first to fail, with code 6" in errors


def test_ranks_that_end_well_leave_nothing_to_say(tmp_path: Path) -> None:
    code, errors, result = run(tmp_path, "true")
    assert (code, errors, "exit=0\n" in result) == (0, "", True)
    assert not (tmp_path / "record" / "first").exists()


def test_a_job_does_not_see_what_sbatch_was_called_with(tmp_path: Path) -> None:
    code, _, _ = run(tmp_path, '[ "${LC_ALL-unset} ${TZ-unset} $MASTER_ADDR" = "unset unset n1" ]')
    assert code == 0
