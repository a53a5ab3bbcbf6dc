"""gtop in a pseudo-terminal that is read as a terminal would draw it, against a real daemon."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from shell import Shell, stopped

pyte = pytest.importorskip("pyte")

SIZES = [(80, 24), (140, 40), (60, 20), (100, 30)]
PATIENCE_S = 60.0
HOSTILE = "evil\x1b[31m\u202ename"


class Terminal:
    """A program in a terminal of this size."""

    def __init__(self, argv: list[str], env: dict[str, str], cwd: Path, width: int = 80, height: int = 24) -> None:
        self.screen = pyte.Screen(width, height)
        self._stream = pyte.ByteStream(self.screen)
        self.raw = b""
        self._master, slave = pty.openpty()
        self.resize(width, height)
        self.before = termios.tcgetattr(slave)
        self._slave = slave

        def own_terminal() -> None:
            os.setsid()
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)

        env = {**env, "TERM": "xterm-256color", "PYTHONUTF8": "1"}
        self.process = subprocess.Popen(
            argv, stdin=slave, stdout=slave, stderr=slave, env=env, cwd=cwd, preexec_fn=own_terminal
        )

    def resize(self, width: int, height: int) -> None:
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))
        self.screen.resize(height, width)

    def read(self, wait_s: float = 0.05) -> None:
        while select.select([self._master], [], [], wait_s)[0]:
            try:
                piece = os.read(self._master, 1 << 16)
            except OSError as error:
                if error.errno == errno.EIO:
                    return
                raise
            self.raw += piece
            # pyte takes a query of a mode for the setting of one.
            self._stream.feed(
                piece.replace(b"\x1b[?2026$p", b"").replace(b"\x1b[?2048$p", b"").replace(b"\x1b[<u", b"")
            )
            wait_s = 0.0

    @property
    def text(self) -> str:
        return "\n".join(line.rstrip() for line in self.screen.display)

    def shows(self, *words: str, without: str | None = None) -> str:
        """Read until all of these are on the screen; returns it."""
        deadline = time.monotonic() + PATIENCE_S
        while not all(word in self.text for word in words) or (without is not None and without in self.text):
            assert time.monotonic() < deadline, (
                f"{words} without {without!r} not in:\n{self.text}\n{self.raw[-2000:]!r}"
            )
            assert self.process.poll() is None, f"it ended with {self.process.returncode}:\n{self.text}"
            self.read()
        return self.text

    def press(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    def ends(self) -> int:
        """Read until it has ended; returns its exit code."""
        deadline = time.monotonic() + PATIENCE_S
        while self.process.poll() is None:
            assert time.monotonic() < deadline, self.text
            self.read()
        self.read()
        return int(self.process.returncode)

    def is_restored(self) -> bool:
        """Whether modes and screen are as before the program."""
        shown = self.raw.rfind(b"\x1b[?1049h") < self.raw.rfind(b"\x1b[?1049l")
        return shown and self.raw.rfind(b"\x1b[?25l") < self.raw.rfind(b"\x1b[?25h") and self.modes() == self.before

    def modes(self) -> list[object]:
        return termios.tcgetattr(self._slave)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        for descriptor in (self._master, self._slave):
            if descriptor >= 0:
                os.close(descriptor)


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    """One scheduler for the module: a running job that says something, a pending one, an array, a held one."""
    root = tmp_path_factory.mktemp("gtop")
    (root / "home").mkdir()
    (root / "home" / "config.toml").write_text('[node]\nname = "lab1"\ncpus = 8\nmem_mib = 65536\n')
    shell = Shell(root / "home", root, GPUSCHED_FAKE_GPUS="2xA100:80GiB")
    shell.submit("--name", "train", "-g", "2", "-t", "2h", "--wrap", "printf 'step \\033[2J1\\n'; sleep 1000")
    shell.submit("--name", HOSTILE, "-g", "1", "-t", "1h", "--", "true")
    shell.submit("--name", "sweep", "-g", "1", "-t", "1h", "-a", "0-9", "--", "true")
    shell.submit("--name", "late", "-g", "1", "--hold", "--", "true")
    yield shell
    stopped(shell)


@pytest.fixture
def gtop(lab: Shell, request: pytest.FixtureRequest) -> Iterator[Terminal]:
    """gtop, in a terminal of 80x24 or as the test says: (width, height, arguments)."""
    width, height, *words = getattr(request, "param", (80, 24))
    terminal = Terminal(lab.argv("gtop", *words), lab.env, lab.work, width, height)
    yield terminal
    terminal.close()


def test_cards_and_queue_are_on_the_screen_at_any_size(gtop: Terminal) -> None:
    for width, height in SIZES:
        gtop.resize(width, height)
        text = gtop.shows("lab1", "0 A100", "train", "> 1", "3[10]+", "JobHeld", "1st", "q quit")
        assert "evil[31mn" in text
        assert "\u202e" not in text
    # Nothing but what gtop itself writes moves the cursor.
    assert b"\x1b[31m" not in gtop.raw
    gtop.press("q")
    assert gtop.ends() == 0
    assert gtop.is_restored()


def test_keys_move_ask_and_act(gtop: Terminal, lab: Shell) -> None:
    gtop.shows("> 1", "JobHeldUser")
    gtop.press("G")
    gtop.shows("> 14")
    gtop.press("r")
    gtop.shows("gctl release 14? [y/N]")
    gtop.press("n")
    gtop.shows("nothing was done", "JobHeldUser")
    gtop.press("r")
    gtop.shows("gctl release 14? [y/N]")
    gtop.press("y")
    gtop.shows("done: gctl release 14", without="JobHeldUser")
    assert json.loads(lab.ok("gshow", "--json", "14"))["jobs"][0]["hold"] is None
    gtop.press("h")
    gtop.shows("gctl hold 14? [y/N]")
    gtop.press("y")
    gtop.shows("JobHeldUser")
    # Several jobs take their number.
    gtop.press("\x1b[A")
    gtop.shows("> 3[10]+")
    gtop.press("c")
    gtop.shows("gcancel 3: type 10")
    gtop.press("y\r")
    gtop.shows("nothing was done", "3[10]+")
    gtop.press("t")
    gtop.shows("3[10]-", "3_0", "3_1")
    gtop.press("t")
    gtop.shows("3[10]+", without="3_0")


def test_filters_panes_log_and_help(gtop: Terminal) -> None:
    gtop.shows("> 1", "sweep")
    gtop.press("/st:PD swee\r")
    gtop.shows("1 of 1", "> 3[10]+", without="JobHeldUser")
    gtop.press("/\x15nope:1\r")
    gtop.shows("'nope' is not a filter key")
    gtop.press("\x1b")
    # Two at once could be taken for a key of its own.
    gtop.shows("1 of 1", without="nope")
    gtop.press("\x1b")
    gtop.shows("1 of 4")
    gtop.press("l")
    # Escape sequences of the job are text.
    gtop.shows("output of 1", "step [2J1")
    gtop.press("l4")
    gtop.shows("FAIR SHARE", without="output of")
    gtop.press("3")
    gtop.shows("BORROWED", "default")
    gtop.press("2?")
    gtop.shows("the cards and the queue, live", "unfold or fold")
    gtop.press("x")
    gtop.shows("> 1", without="unfold or fold")


@pytest.mark.parametrize("gtop", [(80, 24, "--readonly", "--ascii", "user:nobody-here")], indirect=True)
def test_options_set_filter_signs_and_rights(gtop: Terminal) -> None:
    text = gtop.shows("no jobs", "user:nobody-here", "[------]")
    assert "cancel" not in text
    assert "█" not in text
    gtop.press("c")
    gtop.shows("gtop was started with --readonly")


def test_no_color_leaves_no_colour(lab: Shell) -> None:
    terminal = Terminal(lab.argv("gtop"), {**lab.env, "NO_COLOR": "1"}, lab.work)
    try:
        terminal.shows("> 1", "q quit")
        found = {char.fg for line in terminal.screen.buffer.values() for char in line.values()}
        found |= {char.bg for line in terminal.screen.buffer.values() for char in line.values()}
        assert found == {"default"}
    finally:
        terminal.close()


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGHUP, "\x03", "\x1b[21~"])
def test_every_way_out_restores_the_terminal(gtop: Terminal, how: signal.Signals | str) -> None:
    gtop.shows("> 1", "q quit")
    if isinstance(how, str):
        gtop.press(how)
    else:
        gtop.process.send_signal(how)
    assert gtop.ends() == 0
    assert gtop.is_restored()


def test_it_stops_and_goes_on_as_a_job_of_the_shell(gtop: Terminal) -> None:
    gtop.shows("> 1", "q quit")
    gtop.press("\x1a")
    deadline = time.monotonic() + PATIENCE_S
    while not os.waitid(os.P_PID, gtop.process.pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT):
        assert time.monotonic() < deadline
        gtop.read()
    gtop.read()
    assert gtop.is_restored()
    gtop.raw = b""
    gtop.screen.reset()
    gtop.process.send_signal(signal.SIGCONT)
    gtop.shows("> 1", "q quit")
    gtop.press("q")
    assert gtop.ends() == 0


def test_a_bug_restores_the_terminal_and_is_told_in_a_sentence(lab: Shell) -> None:
    code = (
        "import sys; sys.argv[0] = 'gtop'; from gpusched.cli import gtop; from gpusched.addons.top import app\n"
        "def broken(*_): raise RuntimeError('it broke')\n"
        "app.frame = broken; sys.exit(gtop.main())"
    )
    terminal = Terminal([sys.executable, "-c", code], lab.env, lab.work)
    try:
        assert terminal.ends() == 1
        assert terminal.is_restored()
        assert b"gtop: error: this is a bug in gpusched: RuntimeError: it broke" in terminal.raw
        assert b"Traceback" not in terminal.raw
    finally:
        terminal.close()


def test_a_closed_terminal_ends_it(lab: Shell) -> None:
    terminal = Terminal(lab.argv("gtop"), lab.env, lab.work)
    terminal.shows("> 1", "q quit")
    os.close(terminal._slave)
    os.close(terminal._master)
    terminal._master = terminal._slave = -1
    terminal.process.wait(60)
    terminal.close()


def test_a_lost_daemon_is_told_and_found_again(gtop: Terminal, lab: Shell) -> None:
    gtop.shows("> 1", "1 warning: !")
    pid = json.loads(lab.ok("gpusched", "daemon", "status", "--json"))["daemon"]["pid"]
    os.kill(pid, signal.SIGKILL)
    gtop.shows("daemon away since")
    gtop.press("c")
    lab.ok("gq")
    text = gtop.shows("> 1", without="daemon away since")
    assert "gcancel" not in text
    gtop.press("q")
    assert gtop.ends() == 0


def test_it_needs_a_terminal(lab: Shell) -> None:
    done = lab.type("gtop")
    assert (done.code, done.err) == (
        2,
        "gtop: error: gtop needs a terminal\ngtop: hint: in a pipe use: gq, ginfo\n",
    )


@pytest.mark.parametrize(("colors", "is_light"), [("0;15", True), ("0;default;7", True), ("15;0", False), ("", False)])
def test_colours_can_be_read_on_the_ground_of_the_terminal(colors: str, is_light: bool) -> None:
    from gpusched.addons.top.app import has_light_ground, styles

    assert has_light_ground(colors) is is_light
    ground = 1.0 if is_light else 0.0
    for name, style in styles(is_light=is_light).items():
        if style.color is not None:
            # Contrast by WCAG 2.2.
            parts = [part / 255 for part in style.color.get_truecolor()]
            linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
            light = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
            assert (max(light, ground) + 0.05) / (min(light, ground) + 0.05) >= 4.5, name
