"""`gpusched demo`: a first GPU job from submission to output, in a temporary scheduler."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from typing import NoReturn

from gpusched.gpu.source import nvidia_signs

_SIMULATED = "2x24GiB"
_JOB = (
    'echo "Hello from job $GPUSCHED_JOB_ID on $(hostname)."; '
    'echo "CUDA_VISIBLE_DEVICES=$CUDA_VISIBLE_DEVICES: this is the GPU I may use."; '
    "{ command -v nvidia-smi >/dev/null && nvidia-smi -L; } || true; "
    'for step in 1 2 3; do echo "training step $step of 3"; sleep 0.3; done'
)


_LEAVING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_REMOVAL_S = 30
"""The job is given this long to end when the demonstration breaks off."""


def run_demo() -> int:
    """Show each command and its output. Returns 0 if the job COMPLETED, 128 + N after signal N.

    However it ends, nothing of it is left: neither a daemon, nor a job, nor the folder.
    """
    home = tempfile.mkdtemp(prefix="gpusched-demo-")
    env = {name: value for name, value in os.environ.items() if not name.startswith(("GPUSCHED_", "GSUB_"))}
    env["GPUSCHED_HOME"] = home
    before = {number: signal.signal(number, _leave) for number in _LEAVING}
    try:
        _say(f"# Temporary scheduler in {home}, removed at the end.")
        if os.environ.get("GPUSCHED_FAKE_GPUS"):
            env["GPUSCHED_FAKE_GPUS"] = os.environ["GPUSCHED_FAKE_GPUS"]
            _say("# Simulated GPUs, as set by GPUSCHED_FAKE_GPUS.")
        elif not _has_gpus(env):
            env["GPUSCHED_FAKE_GPUS"] = _SIMULATED
            _say(f"# No GPU found, so two are SIMULATED: GPUSCHED_FAKE_GPUS={_SIMULATED}")
        code = _type(["ginfo"], env, home)
        code |= _type(["gsub", "--name", "hello", "-g", "1", "-t", "5m", "--follow", "--wrap", _JOB], env, home)
        code |= _type(["gq", "--all"], env, home)
        code |= _type(["gshow", "@"], env, home)
        _type(["gpusched", "daemon", "stop"], env, home)
    finally:
        for number in _LEAVING:
            signal.signal(number, signal.SIG_IGN)
        _remove(env, home)
        for number, handler in before.items():
            signal.signal(number, handler)
    _say(
        "# It works. Your own first job:  gsub -g 1 -- COMMAND   then:  gq"
        if code == 0
        else "# Something failed; see above."
    )
    return 1 if code else 0


def _leave(number: int, frame: object) -> NoReturn:
    raise SystemExit(128 + number)


def _remove(env: dict[str, str], home: str) -> None:
    if os.path.exists(os.path.join(home, "run", "api.sock")):
        # It broke off: a job that went on would keep the folder.
        for words in (["gcancel", "--all", "--yes"], ["gwait", "--timeout", str(_REMOVAL_S), "@"]):
            _run(words, env)
        _run(["gpusched", "daemon", "stop"], env)
    shutil.rmtree(home, ignore_errors=True)


def _run(words: list[str], env: dict[str, str]) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([*_program(words[0]), *words[1:]], env=env, capture_output=True, check=False)


def _has_gpus(env: dict[str, str]) -> bool:
    if not nvidia_signs():
        return False
    found = bool(_run(["ginfo", "--quiet"], env).stdout.strip())
    if not found:
        # The daemon would keep its first result, no GPUs.
        _run(["gpusched", "daemon", "stop"], env)
    return found


def _program(name: str) -> list[str]:
    """This installation's own command, even if it is not on PATH."""
    module = "admin" if name == "gpusched" else name
    code = f"import sys; from gpusched.cli.{module} import main; sys.exit(main())"
    return [sys.executable, "-c", code]


def _type(words: list[str], env: dict[str, str], folder: str) -> int:
    shown = " ".join(word if word.isprintable() and " " not in word else "'...'" for word in words)
    _say(f"\n$ {shown}")
    return subprocess.run([*_program(words[0]), *words[1:]], env=env, cwd=folder, check=False).returncode


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
