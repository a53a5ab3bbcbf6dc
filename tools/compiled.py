"""The planner and its simulation as compiled extensions, with mypyc: the same modules, two to three times as fast.

    python -m tools.compiled FOLDER [--quick]   copy this clone there with these modules compiled, to run tests and
                                                benchmarks in; --quick: compiled in less time, slower than otherwise

`GPUSCHED_COMPILE=1 pip install .` installs them, see `hatch_build`. It takes mypy, setuptools, a C compiler and the
headers of Python; otherwise the modules run as they are. An editable install is never compiled: edits would not count.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
COMPILED = (
    "gpusched/scheduler/**/*.py",
    "gpusched/predict/predictor.py",
    "gpusched/predict/family.py",
    "gpusched/addons/simulate/planner_run.py",
)
"""Pure modules alone, which decide: nothing of a user's or of a plug-in's is compiled with them."""
PLAIN = frozenset({"admission", "burst", "forecast", "infeasible", "invariants", "shortages", "whatif"})
"""Not these of them. They write sentences, where `float` would turn a number 4 into 4.0, and no tick spends its time
there; `forecast` runs beside the daemon's main thread, which gets a turn between its plans, and none in compiled code.
"""
_GROUP = "gpusched"
FAST, QUICK = "2", "0"
"""Levels of optimisation."""


def compile_into(folder: Path, level: str = FAST) -> list[Path]:
    """Compile the modules of the clone; returns the libraries, by their paths below `folder`.

    Raises: subprocess.CalledProcessError, whose output says what is missing or wrong.
    """
    # mypyc takes the names of modules from the working directory, and leaves the interpreter when something is wrong.
    subprocess.run(
        [sys.executable, "-m", "tools.compiled", "--libraries", str(folder.resolve()), level],
        cwd=ROOT,
        check=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return sorted(path.relative_to(folder) for path in folder.rglob("*.so"))


def _make_libraries(folder: Path, level: str) -> None:
    from mypyc.build import mypycify
    from setuptools import Distribution
    from setuptools.command.build_ext import build_ext

    found = (path for pattern in COMPILED for path in Path().glob(pattern) if path.stem not in PLAIN)
    files = sorted(map(str, found))
    # Stubs of other packages may be missing where this is installed: `mypy` alone checks against them.
    flags = ["--config-file=", "--ignore-missing-imports", "--explicit-package-bases"]
    with tempfile.TemporaryDirectory(prefix="gpusched-compiled-") as work:
        extensions = mypycify(
            [*flags, *files],
            opt_level=level,
            debug_level="0",
            multi_file=True,
            target_dir=work,
            group_name=_GROUP,
        )
        command = _parallel(build_ext)(Distribution({"name": "gpusched", "ext_modules": extensions}))
        command.build_lib, command.build_temp = str(folder), str(Path(work, "objects"))
        command.ensure_finalized()
        command.run()


def _parallel(build_ext: Any) -> Any:
    """`build_ext`, with the sources of one extension compiled in parallel: one of them has nearly all."""

    class ParallelBuild(build_ext):  # type: ignore[misc]
        def build_extensions(self) -> None:
            compile_one = self.compiler.compile

            def compile_all(sources: list[str], **named: Any) -> list[str]:
                made = pool.map(lambda source: compile_one([source], **named), sources)
                return [path for paths in made for path in paths]

            self.compiler.compile = compile_all
            with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
                super().build_extensions()

    return ParallelBuild


def copy_of_clone(folder: Path, level: str = FAST) -> None:
    """Copy what git knows of the clone, and the modules that installing makes, and compile the copy."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    made = ["gpusched/sdk/async_client.py", "gpusched/sdk/job_options.py"]
    for name in (*listed.stdout.splitlines(), *made):
        source, target = ROOT / name, folder / name
        if source.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target)
    compile_into(folder, level)


def main(words: list[str]) -> None:
    if words[:1] == ["--libraries"]:
        _make_libraries(Path(words[1]), words[2])
        return
    options = [word for word in words if word.startswith("-")]
    folders = [word for word in words if not word.startswith("-")]
    if len(folders) != 1 or set(options) - {"--quick"}:
        sys.exit("usage: python -m tools.compiled FOLDER [--quick]")
    try:
        copy_of_clone(Path(folders[0]), QUICK if options else FAST)
    except subprocess.CalledProcessError as error:
        sys.exit(f"{error.stdout or ''}\nthe planner could not be compiled")


if __name__ == "__main__":
    main(sys.argv[1:])
