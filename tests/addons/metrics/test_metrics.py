"""`gpusched metrics` as an administrator types it: printed, into a file, and served to Prometheus."""

from __future__ import annotations

import http.client
import os
import re
import signal
import socket
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path
from threading import Thread

import pytest
from exposition_reader import read_page, values
from shell import Shell
from support import wait_until

from gpusched import paths
from gpusched.addons.metrics import exporter
from gpusched.errors import NotReady, UsageError

OPEN = "application/openmetrics-text; version=1.0.0; charset=utf-8"
PLAIN = "text/plain; version=0.0.4; charset=utf-8"
DOWN = "# HELP gpusched_up 1 while the daemon answers, 0 while it does not.\n# TYPE gpusched_up gauge\ngpusched_up 0\n"


def grown(before: str, after: str) -> bool:
    """Whether nothing that only grows has shrunk from one page to the next."""
    pages = [read_page(text, is_open=True) for text in (before, after)]
    first, second = (
        {
            mark: value
            for family in page.values()
            if family.kind in ("counter", "histogram")
            for mark, value in family.samples.items()
        }
        for page in pages
    )
    return first.keys() <= second.keys() and all(second[mark] >= value for mark, value in first.items())


# --- once ----------------------------------------------------------------------------------------


def test_a_page_is_printed_in_either_format(sh: Shell) -> None:
    job = sh.submit("-g", "1", "--", "sleep", "60")
    plain = sh.ok("gpusched", "metrics")
    first = sh.ok("gpusched", "metrics", "--format", "openmetrics")
    assert values(plain)["gpusched_up", ()] == 1
    assert first.endswith("# EOF\n")
    assert values(first, is_open=True).keys() == values(plain).keys()
    sh.ok("gcancel", job)
    sh.type("gwait", job)
    second = sh.ok("gpusched", "metrics", "--format", "openmetrics")
    assert grown(first, second)
    assert not grown(second, first)
    assert values(second, is_open=True)["gpusched_store_size_bytes", ()] > 4096


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--format", "xml"), "'xml' is not a format"),
        (("--listen", "127.0.0.1:0", "--output", "x"), "--listen excludes --output and --format"),
        (("--listen", "9835"), "'9835' is not an IP address and port"),
        (("--listen", "example.org:80"), "'example.org:80' is not an IP address and port"),
    ],
)
def test_invalid_options_are_refused(sh: Shell, words: tuple[str, ...], told: str) -> None:
    done = sh.type("gpusched", "metrics", *words)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith(f"gpusched: error: {told}")


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("127.0.0.1:9835", ("127.0.0.1", 9835)),
        (":9835", ("127.0.0.1", 9835)),
        ("0.0.0.0:0", ("0.0.0.0", 0)),
        ("[::1]:80", ("::1", 80)),
    ],
)
def test_addresses_are_parsed(text: str, found: tuple[str, int]) -> None:
    assert exporter.address(text) == found


@pytest.mark.parametrize("text", ["", "::1:80", "127.0.0.1", "127.0.0.1:", "127.0.0.1:65536", "1:²", "a b:1", "[::1]"])
def test_invalid_addresses_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="is not an IP address and port"):
        exporter.address(text)


def test_metrics_fail_without_a_daemon_and_start_none(own: Shell) -> None:
    done = own.type("gpusched", "metrics")
    assert (done.code, done.out) == (1, "")
    assert done.err == (
        f"gpusched: error: no daemon answers on {own.home}/run/api.sock: No such file or directory\n"
        "gpusched: hint: start it with: gpusched daemon start\n"
    )
    assert own.type("gpusched", "daemon", "status").code == 1


def test_the_file_is_replaced_atomically_and_readable_by_the_collector(own: Shell, tmp_path: Path) -> None:
    folder = tmp_path / "collector"
    folder.mkdir()
    path = folder / "gpusched.prom"
    path.write_text("gpusched_old 1\n")
    inode = path.stat().st_ino
    own.ok("gpusched", "daemon", "start")
    assert own.ok("gpusched", "metrics", "--output", str(path)) == ""
    assert values(path.read_text())["gpusched_up", ()] == 1
    assert path.stat().st_ino != inode
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    own.ok("gpusched", "daemon", "stop")
    done = own.type("gpusched", "metrics", "-o", str(path))
    # What was true an hour ago must not look as if it were now.
    assert (done.code, path.read_text()) == (1, DOWN)
    assert "no daemon answers" in done.err
    assert os.listdir(folder) == ["gpusched.prom"]


def test_a_missing_folder_is_named(own: Shell, tmp_path: Path) -> None:
    own.ok("gpusched", "daemon", "start")
    done = own.type("gpusched", "metrics", "-o", str(tmp_path / "no" / "x.prom"))
    assert done.code == 1
    assert "No such file or directory" in done.err
    assert str(tmp_path / "no") in done.err
    assert "bug" not in done.err


def test_a_hanging_daemon_times_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(exporter, "ASK_TIMEOUT_S", 0.05)
    monkeypatch.setenv("GPUSCHED_SOCKET", str(tmp_path / "s"))
    with socket.socket(socket.AF_UNIX) as deaf:
        deaf.bind(str(tmp_path / "s"))
        deaf.listen()
        with pytest.raises(NotReady, match="has not answered"):
            exporter.write(str(tmp_path / "x.prom"), "prometheus")
    assert (tmp_path / "x.prom").read_text() == DOWN


def test_a_daemon_that_disappears_midway_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("GPUSCHED_SOCKET", str(tmp_path / "s"))
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "s"))
        listener.listen()

        def answer() -> None:
            # Twice: a connection that breaks may be one of a daemon that was started again since.
            for _ in range(2):
                connection, _ = listener.accept()
                with connection:
                    connection.recv(1000)
                    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\ngpusched_up 1")

        thread = Thread(target=answer)
        thread.start()
        with pytest.raises(NotReady, match="went away"):
            exporter.read("prometheus")
        thread.join()


def test_root_is_warned_that_root_is_unnecessary(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 0)
    monkeypatch.setattr(exporter, "_serve", lambda host, port: None)
    monkeypatch.setattr("asyncio.run", lambda served: None)
    for socket_path, is_told in ((paths.SYSTEM_SOCKET, True), ("/home/ann/api.sock", False)):
        monkeypatch.setenv("GPUSCHED_SOCKET", socket_path)
        exporter.serve("127.0.0.1:0")
        assert ("running as root" in capsys.readouterr().err) is is_told


# --- served --------------------------------------------------------------------------------------


class Server:
    """`gpusched metrics --listen` in a process of its own."""

    def __init__(self, shell: Shell) -> None:
        self.process = subprocess.Popen(
            shell.argv("gpusched", "metrics", "--listen", "127.0.0.1:0"),
            env=shell.env,
            cwd=shell.work,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.line = self.process.stdout.readline()
        match = re.match(r"http://127\.0\.0\.1:(\d+)/metrics serves ", self.line)
        assert match, (self.line, self.process.stderr and self.process.stderr.read())
        self.port = int(match[1])

    def get(self, path: str = "/metrics", method: str = "GET", **headers: str) -> tuple[int, str | None, str]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request(method, path, headers=headers)
            answer = connection.getresponse()
            return answer.status, answer.getheader("Content-Type"), answer.read().decode()
        finally:
            connection.close()

    def end(self) -> tuple[int, str]:
        """Exit code and what it said."""
        self.process.send_signal(signal.SIGTERM)
        _, err = self.process.communicate(timeout=60)
        return self.process.returncode, err


@pytest.fixture
def server(own: Shell) -> Iterator[Server]:
    made = Server(own)
    yield made
    if made.process.poll() is None:
        made.process.kill()
    made.process.communicate()


def test_the_page_is_served_in_the_requested_format(own: Shell, server: Server) -> None:
    own.ok("gpusched", "daemon", "start")
    assert server.line.endswith(f"{own.home}/run/api.sock\n")
    status, kind, plain = server.get()
    assert (status, kind) == (200, PLAIN)
    assert values(plain)["gpusched_up", ()] == 1
    accept = "application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.3,*/*;q=0.1"
    status, kind, first = server.get(Accept=accept)
    assert (status, kind) == (200, OPEN)
    own.submit("--wait", "-g", "1", "--", "true")
    _, _, second = server.get(Accept=accept)
    assert grown(first, second)
    assert not grown(second, first)


def test_only_reading_is_allowed(own: Shell, server: Server) -> None:
    own.ok("gpusched", "daemon", "start")
    assert server.get(method="HEAD")[::2] == (200, "")
    assert server.get("/")[0] == 200
    for path in ("/v1/metrics", "/v1/jobs", "/v1/shutdown", "/metrics/../v1/shutdown", "/metrics?format=xml"):
        assert server.get(path)[0] == (200 if "?" in path else 404)
    for method in ("POST", "PUT", "DELETE", "PATCH"):
        assert server.get(method=method)[0] == 405
    assert own.type("gpusched", "daemon", "status").code == 0


def test_the_page_reports_the_daemon_down_and_up_again(own: Shell, server: Server) -> None:
    assert server.get()[::2] == (200, DOWN)
    own.ok("gpusched", "daemon", "start")
    wait_until(lambda: values(server.get()[2])["gpusched_up", ()] == 1, what="the daemon to be told of")
    own.ok("gpusched", "daemon", "stop")
    assert server.get()[::2] == (200, DOWN)
    assert server.get()[2] == DOWN
    code, err = server.end()
    assert code == 0
    lines = [line for line in err.splitlines() if "running as root" not in line]
    # Once for each change, not for each look.
    assert [line.split(":")[1].split(" on ")[0] for line in lines] == [
        " no daemon answers",
        " the daemon answers again",
        " no daemon answers",
    ]


def test_concurrent_scrapes_and_an_endless_one_do_no_harm(own: Shell, server: Server) -> None:
    own.ok("gpusched", "daemon", "start")
    with socket.create_connection(("127.0.0.1", server.port)) as slow:
        slow.sendall(b"GET /metrics HTTP/1.1\r\nHost: ")
        pages: list[str] = []
        threads = [Thread(target=lambda: pages.append(server.get()[2])) for _ in range(12)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert [values(page)["gpusched_up", ()] for page in pages] == [1] * 12


def test_an_address_in_use_is_named(own: Shell, server: Server) -> None:
    done = own.type("gpusched", "metrics", "--listen", f"127.0.0.1:{server.port}")
    assert done.code == 1
    assert f"gpusched: error: cannot listen on 127.0.0.1:{server.port}: Address already in use" in done.err
