"""Plant faults in a copy of the package, one at a time, and tell which of them the quick tests find.

usage: python -m tools.mutations [PART]    only the faults whose file or tests contain PART; exit code: number missed
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
_LONGEST_S = 1800.0


class Fault(NamedTuple):
    """A fault, and the tests from which one is to fail."""

    file: str
    """Below `gpusched`."""
    right: str
    """What stands there once."""
    wrong: str
    tests: str
    """Files or folders below `tests`."""


FAULTS = [
    Fault(
        "scheduler/gates.py",
        "if held < limit:",
        "if held <= limit:",
        "unit/test_arrays_by_hand.py properties/test_array_properties.py",
    ),
    Fault(
        "scheduler/limits.py",
        "held[kind] + needed[kind] > most:",
        "held[kind] + needed[kind] >= most:",
        "unit/test_scheduler_quota_limits.py",
    ),
    Fault(
        "scheduler/limits.py",
        "most_jobs is not None and by_user[JOBS] >= most_jobs",
        "most_jobs is not None and by_user[JOBS] > most_jobs",
        "unit/test_scheduler_quota_limits.py properties/test_quota_properties.py",
    ),
    Fault(
        "scheduler/timeline.py",
        "            if end_at > one.pass_until:\n                one.state",
        "            if end_at >= one.pass_until + 60:\n                one.state",
        "properties/test_reference_planner.py",
    ),
    Fault(
        "scheduler/timeline.py",
        "if not tight or self.state.layout.is_flat:",
        "if not tight or not self.state.layout.is_flat:",
        "properties/test_reference_planner.py scenarios/test_order_and_backfill.py",
    ),
    Fault(
        "scheduler/placement.py",
        "return not request.is_linked or",
        "return request.is_linked or",
        "properties/test_placement_properties.py unit/test_validate_placement.py",
    ),
    Fault(
        "scheduler/budget.py", "if asked_s > left_s + 1e-6:", "if asked_s > granted_s + 1e-6:", "unit/test_budgets.py"
    ),
    Fault(
        "scheduler/preemption.py",
        "or job_id in self.chosen or self._safe_until(one) > at:",
        "or job_id in self.chosen:",
        "properties/test_preemption_properties.py scenarios/test_preemption_by_qos.py",
    ),
    Fault(
        "scheduler/rules.py",
        "        if len(self.reservations) >= self.depth:\n            # With",
        "        if len(self.reservations) > self.depth:\n            # With",
        "properties/test_reference_planner.py scenarios/test_conservative_backfill.py",
    ),
    Fault(
        "scheduler/reservation.py",
        "return self.start <= instant < self.end",
        "return self.start <= instant <= self.end",
        "unit/test_scheduler_calendar.py scenarios/test_calendar_windows.py",
    ),
    Fault(
        "lifecycle/retry.py",
        'if failure.kind in ("timeout", "node_fail"):',
        'if failure.kind in ("node_fail",):',
        "unit/test_lifecycle_retry.py",
    ),
    Fault(
        "lifecycle/dependencies.py",
        'kind in ("afterok", "aftercorr") and',
        'kind == "afterok" and',
        "unit/test_lifecycle_dependencies.py",
    ),
    Fault(
        "lifecycle/transitions.py",
        "job.failures < rule.retries)",
        "job.failures <= rule.retries)",
        "unit/test_preempted_runs.py",
    ),
    Fault("lifecycle/arrays.py", "ended.failed > most and", "ended.failed >= most and", "unit/test_arrays_by_hand.py"),
    Fault(
        "lifecycle/run_transitions.py",
        "return run.reason is not ReasonCode.PREEMPTED and not run.is_filler",
        "return not run.is_filler",
        "unit/test_preempted_runs.py unit/test_usage_accounting.py properties/test_usage_properties.py",
    ),
    Fault(
        "daemon/commit.py",
        "        if fence_at is None and job_id in self.state.rows[KEPT_PLACES]:\n",
        "        if False:\n",
        "unit/test_fences.py unit/test_tick.py properties/test_memory_properties.py",
    ),
    Fault(
        "daemon/commit.py",
        "and before is None and job.array_id is None:",
        "and before is None:",
        "unit/test_arrays_by_hand.py",
    ),
    Fault(
        "daemon/reconcile.py",
        'return StopOrder("requeue" if job.reason is ReasonCode.REQUEUED else "preempt", grace_s=grace_s)',
        "return None",
        "properties/test_decide_properties.py unit/test_preempted_runs.py unit/test_tick.py",
    ),
    Fault(
        "engine/contact.py",
        "(1.0 + MARGIN_FRACTION) + MARGIN_S",
        "(1.0 + MARGIN_FRACTION) - MARGIN_S",
        "unit/test_contact.py properties/test_lease_properties.py",
    ),
    Fault(
        "daemon/launch/slurm_variables.py",
        '"SLURM_UMASK": f"{spec.launch.umask:04o}"',
        '"SLURM_UMASK": f"{spec.launch.umask:03o}"',
        "unit/test_slurm_variables.py",
    ),
    Fault(
        "gpu/topology.py",
        "for number, word in enumerate(mask)",
        "for number, word in enumerate(mask, 1)",
        "unit/test_gpu_nvml.py",
    ),
    Fault(
        "model/units.py",
        "if not 0 < seconds <= MAX_SECONDS:",
        "if not 0 <= seconds <= MAX_SECONDS:",
        "unit/test_units.py unit/test_cli_parse.py",
    ),
    Fault(
        "model/option.py",
        "    if not 0 < fraction <= 1:\n        shown",
        "    if not 0 <= fraction <= 2:\n        shown",
        "unit/test_cli_parse.py",
    ),
    Fault("gpu/worker.py", "if answer.request != self._asked:", "if False:", "unit/test_gpu_worker.py"),
    Fault(
        "api/rate_limits.py",
        "wanted = min(tokens, most)",
        "wanted = tokens",
        "security/test_request_limits.py",
    ),
    Fault(
        "daemon/watch/checkpoints.py",
        "job.end_at > before)",
        "job.end_at < before)",
        "daemon/test_checkpoint_folders.py",
    ),
    Fault(
        "predict/family.py",
        "if len(newest) < LEAST_RUNS:",
        "if len(newest) <= LEAST_RUNS:",
        "unit/test_predict_families.py",
    ),
    Fault("api/visibility.py", "if job is None or not self.sees(job):", "if job is None:", "daemon/test_access.py"),
]


def plant(fault: Fault, folder: Path) -> None:
    """Write the fault into a copy. Raises: ValueError where the code is another one by now."""
    path = folder / "gpusched" / fault.file
    text = path.read_text()
    if text.count(fault.right) != 1:
        raise ValueError(f"{fault.file} has not once: {fault.right}")
    path.write_text(text.replace(fault.right, fault.wrong))


def is_found(fault: Fault) -> bool:
    """Whether a test fails in a copy of the checkout that has the fault."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for part in ("gpusched", "tests", "tools", "benchmarks", "docs", "pyproject.toml"):
            copy = shutil.copytree if (ROOT / part).is_dir() else shutil.copy
            copy(ROOT / part, folder / part)
        plant(fault, folder)
        files = [str(Path("tests", each)) for each in fault.tests.split()]
        words = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:xdist", *files]
        done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=_LONGEST_S)
        if done.returncode not in (0, 1):
            raise RuntimeError(done.stdout[-2000:] + done.stderr[-2000:])
        return done.returncode == 1


def main(part: str = "") -> int:
    """Try each fault. Returns: how many were missed."""
    missed = 0
    for fault in FAULTS:
        if part in fault.file or part in fault.tests:
            found = is_found(fault)
            missed += not found
            print(f"{'found ' if found else 'MISSED'} {fault.file}: {fault.wrong.strip()}", flush=True)
    return missed


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
