"""%%gpu: cells of a notebook as jobs, with variables in and out, output, failures and interrupts."""

from __future__ import annotations

import _thread
import contextlib
import io
import sys
import threading
import types
from collections.abc import Iterator
from typing import Any

import pytest
from harness import Daemon
from support import wait_until

import gpusched
from gpusched.addons.notebook.notebook import CellError, CellInterrupted, cell_table, divided
from gpusched.sdk.cell import MissingOutput, packed, run_cell

pytest.importorskip("cloudpickle", reason="cloudpickle is not installed: pip install '.[executor]'")


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    daemon = Daemon(tmp_path_factory.mktemp("notebook") / "home", fake_gpus="1x24GiB")
    daemon.start()
    yield daemon
    daemon.close()


class Shell:
    """What the extension uses of IPython's shell."""

    def __init__(self) -> None:
        self.user_ns: dict[str, Any] = {}
        self.magics: dict[tuple[str, str], Any] = {}

    def register_magic_function(self, function: Any, kind: str, name: str) -> None:
        self.magics[kind, name] = function

    def cell(self, line: str, code: str) -> str:
        """Run a cell; returns what was printed."""
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            self.magics["cell", "gpu"](line, code)
        return printed.getvalue()

    def failure(self, line: str, code: str) -> tuple[CellError, str]:
        """Run a cell that fails; returns the error and what was printed."""
        with contextlib.redirect_stdout(io.StringIO()) as printed, pytest.raises(CellError) as caught:
            self.magics["cell", "gpu"](line, code)
        return caught.value, printed.getvalue()


@pytest.fixture
def shell(lab: Daemon, monkeypatch: pytest.MonkeyPatch) -> Shell:
    for name in ("GPUSCHED_SOCKET", "GPUSCHED_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("GPUSCHED_HOME", str(lab.home))
    found = Shell()
    gpusched.load_ipython_extension(found)  # type: ignore[attr-defined]
    return found


def test_variables_go_in_and_come_back_and_output_is_shown(shell: Shell) -> None:
    shell.user_ns["data"] = [1, 2, 3]
    printed = shell.cell(
        "-g 1 -c 0 -t 5m -i data -o total,Model -o twice",
        "import os\n"
        "class Model:\n    name = 'm'\n"
        "def twice(x):\n    return 2 * x\n"
        "total = sum(data)\n"
        "print('\\r10%', end='')\nprint('\\r20%')\n"
        "os.environ['CUDA_VISIBLE_DEVICES']",
    )
    assert shell.user_ns["total"] == 6
    assert (shell.user_ns["twice"](4), shell.user_ns["Model"]().name) == (8, "m")
    lines = printed.splitlines()
    assert "runs on" in printed
    assert "GPU 0" in printed
    assert "\r10%\r20%\n'0'\n" in printed
    assert lines[-1].startswith("%%gpu: job ")
    assert lines[-1].endswith("; brought back total, Model, twice")


def test_a_failing_cell_shows_its_own_traceback_once(shell: Shell, lab: Daemon) -> None:
    error, printed = shell.failure("-c 0", "def f(x):\n    raise ValueError('bad ' + x)\nf('one')")
    assert printed.count("ValueError: bad one") == 1
    assert printed.partition("Traceback")[2].splitlines()[1].strip() == 'File "<cell>", line 3, in <module>'
    assert "raise ValueError('bad ' + x)" in printed
    assert str(error) == f"job {error.job_id} failed: ValueError: bad one"
    assert isinstance(error.__cause__, ValueError)
    assert lab.call("GET", f"/v1/jobs/{error.job_id}")["job"]["state"] == "FAILED"
    assert error._render_traceback_() == [f"%%gpu: {error}", f"%%gpu: hint: {error.hint}"]


@pytest.mark.parametrize(
    ("line", "code", "words"),
    [
        ("-c 0 -o missing", "x = 1", "the cell has defined no variable missing"),
        ("-c 0", "import sys; sys.exit(3)", "failed: SystemExit: 3"),
        ("-c 0", "import os; os.kill(os.getpid(), 9)", "ended by signal 9"),
        ("-c 0 -o lock", "import threading; lock = threading.Lock()", "cannot pickle"),
    ],
)
def test_ends_without_a_result_are_errors(shell: Shell, line: str, code: str, words: str) -> None:
    error, _ = shell.failure(line, code)
    assert words in str(error)
    assert error.job_id is not None


@pytest.mark.parametrize(
    ("line", "code", "words"),
    [
        ("-i nothing", "1", "the notebook has no variable nothing"),
        ("-i lock", "1", "the variables lock cannot travel"),
        ("-i 'a b'", "1", "'a b' is not the name of a variable"),
        ("-t soon", "1", "'soon' is not a time"),
        ("-g 9", "1", "asked for 9 GPUs"),
        ("--venv x", "1", "unknown option '--venv'"),
        ("train.py", "1", "unexpected argument 'train.py'"),
        ("-g '1", "1", "is not closed"),
        ("", " \n", "the cell is empty"),
        ("", "x = (", "line 1: '(' was never closed"),
        ("", "!nvidia-smi", "line 1: invalid syntax: !nvidia-smi"),
    ],
)
def test_mistakes_are_told_before_anything_waits(shell: Shell, lab: Daemon, line: str, code: str, words: str) -> None:
    shell.user_ns["lock"] = threading.Lock()
    before = lab.call("GET", "/v1/jobs?states=all")["jobs"]
    error, printed = shell.failure(line, code)
    assert words in str(error)
    assert printed == ""
    assert len(lab.call("GET", "/v1/jobs?states=all")["jobs"]) == len(before)


def test_a_waiting_cell_says_why_and_an_interrupt_cancels_it(
    shell: Shell, lab: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpusched.addons.notebook.notebook.SOON_S", 0.01)
    monkeypatch.setattr("gpusched.addons.notebook.notebook.LOOK_S", 0.05)

    def interrupt(name: str, state: str) -> None:
        wait_until(
            lambda: [job for job in lab.call("GET", f"/v1/jobs?names={name}")["jobs"] if job["state"] == state],
            what=f"{name} to be {state}",
        )
        if state == "PENDING":
            wait_until(lambda: "waits" in printed.getvalue(), what="the reason")
        _thread.interrupt_main()

    for name, options, state in (("late", "--begin now+1hour", "PENDING"), ("busy", "-c 0", "RUNNING")):
        printed = io.StringIO()
        other = threading.Thread(target=interrupt, args=(name, state))
        other.start()
        with contextlib.redirect_stdout(printed), pytest.raises(CellInterrupted, match=r"job \d+ was cancelled"):
            shell.magics["cell", "gpu"](f"-c 0 -J {name} {options}", "import time; time.sleep(600)")
        other.join()
        job = lab.call("GET", f"/v1/jobs?names={name}&states=all")["jobs"][0]
        assert job["state"] == "CANCELLED"
        lab.disconnect()


def test_help_lists_the_options(shell: Shell) -> None:
    text = shell.cell("--help", "1")
    assert "%%gpu -g 1 -t 1h -i data -o model" in text
    assert "--vram SIZE" in text
    names = [name for option in cell_table().options for name in option.names]
    assert len(names) == len(set(names))


def test_a_real_shell_runs_cells_and_shows_errors_in_two_lines(
    shell: Shell, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("IPython", reason="IPython is not installed: pip install ipython")
    from IPython.core.interactiveshell import InteractiveShell
    from traitlets.config import Config

    monkeypatch.setitem(sys.modules, "__main__", types.ModuleType("__main__"))
    config = Config()
    config.HistoryManager.enabled = False
    real = InteractiveShell(config=config)
    try:
        assert real.run_cell("%load_ext gpusched\nclass Net:\n    width = 7\nnet = Net()").success
        assert real.run_cell("%%gpu -c 0 -i net -o width\nwidth = net.width").success
        assert real.user_ns["width"] == 7
        # Braces are the code's, and no variables of the notebook.
        assert real.run_cell("%gpu -c 0 -i net -o text -- text = f'{net.width} wide'; print({1: 2})").success
        assert real.user_ns["text"] == "7 wide"
        assert "{1: 2}" in capsys.readouterr().out
        assert isinstance(real.run_cell("%gpu -c 0").error_in_exec, CellError)
        capsys.readouterr()
        found = real.run_cell("%%gpu -c 0\n1 / 0")
        assert isinstance(found.error_in_exec, CellError)
        shown = capsys.readouterr().out.splitlines()
        assert "ZeroDivisionError: division by zero" in shown
        assert [line.partition(" ")[0] for line in shown[-2:]] == ["%%gpu:", "%%gpu:"]
    finally:
        real.reset()
        InteractiveShell.clear_instance()


@pytest.mark.parametrize(
    ("line", "parts"),
    [
        ("-g 1 -o y -- y = f(x)", ("-g 1 -o y", "y = f(x)")),
        ("-- y = a -- b", ("", "y = a -- b")),
        ("--help", ("--help", "")),
    ],
)
def test_a_line_has_its_code_after_two_dashes(line: str, parts: tuple[str, str]) -> None:
    assert divided(line) == parts


@pytest.mark.parametrize("line", ["", "-g 1", "-g 1 --", "y = f(x)"])
def test_a_line_without_code_is_refused(line: str) -> None:
    with pytest.raises(CellError, match="there is no code"):
        divided(line)


def test_a_line_runs_as_a_job(shell: Shell) -> None:
    shell.user_ns["x"] = 20
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        shell.magics["line", "gpu"]("-c 0 -i x -o y -- y = x + 1; print(y)")
    assert shell.user_ns["y"] == 21
    assert "21" in printed.getvalue().splitlines()


# --- the call in the job ----------------------------------------------------------------------------


def test_a_cell_is_a_main_program(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    import pickle

    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    found = pickle.loads(run_cell("if __name__ == '__main__':\n    b = a + 1\nb", packed({"a": 1}), ["b"]))
    assert (found, capsys.readouterr().out) == ({"b": 2}, "2\n")
    run_cell("None", packed({}), [])
    run_cell("3;", packed({}), [])
    assert capsys.readouterr().out == ""
    with pytest.raises(MissingOutput, match="no variable c"):
        run_cell("b = 1", packed({}), ["c"])
