"""Hydra's submitit launcher: a sweep as a job array."""

import pathlib
import subprocess
import sys

pathlib.Path("app.py").write_text(
    """
import os
import hydra

@hydra.main(version_base=None, config_path=None)
def main(cfg):
    print("job", os.environ["SLURM_ARRAY_TASK_ID"], "x", cfg.x)
    return cfg.x

if __name__ == "__main__":
    main()
"""
)
done = subprocess.run(
    [
        *(sys.executable, "app.py", "-m", "+x=1,2,3", "hydra/launcher=submitit_slurm"),
        *("hydra.launcher.timeout_min=5", "hydra.launcher.partition=main", "hydra.launcher.cpus_per_task=1"),
        *("hydra.launcher.mem_gb=1", "hydra.launcher.array_parallelism=2", "hydra.sweep.dir=sweep"),
    ],
    timeout=400,
)
assert done.returncode == 0
logs = "".join(path.read_text() for path in pathlib.Path("sweep").rglob("*_log.out"))
assert all(f"job {number} x {number + 1}" in logs for number in range(3)), logs
