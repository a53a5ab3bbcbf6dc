"""grun --jupyter with a jupyter that only plays one."""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import signal
import subprocess
import urllib.request
from pathlib import Path

import pytest
from shell import Shell

from gpusched.cli.jupyter import Notebook
from gpusched.errors import Refused, UsageError

JUPYTER = """#!/usr/bin/env python3
import http.server, os, sys, urllib.parse
token, port = os.environ["JUPYTER_TOKEN"], int(next(word for word in sys.argv if word.startswith("--port="))[7:])

class Server(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        given = urllib.parse.parse_qs(urllib.parse.urlsplit(self.path).query).get("token")
        self.send_response(200 if given == [token] else 403)
        self.end_headers()
        self.wfile.write(" ".join(sys.argv[1:]).encode())

    def log_message(self, *words):
        pass

server = http.server.HTTPServer(("127.0.0.1", 0), Server)
url = "http://127.0.0.1:%d/lab?token=..." % server.server_port
print("[I ServerApp] Extension package loaded\\n    " + url[:20], end="", file=sys.stderr, flush=True)
print(url[20:] + "\\n    " + url, file=sys.stderr, flush=True)
server.serve_forever()
"""


@pytest.fixture
def tools(own: Shell) -> Path:
    """A folder with a jupyter, first in PATH."""
    folder = own.work / "tools"
    folder.mkdir()
    for name in ("jupyter", "jupyter-lab"):
        (folder / name).write_text(JUPYTER)
        (folder / name).chmod(0o755)
    return folder


def test_a_notebook_is_reached_with_what_grun_prints_and_its_token_is_nowhere_else(own: Shell, tools: Path) -> None:
    env = {**own.env, "PATH": f"{tools}:{own.env['PATH']}"}
    words = own.argv("grun", "-g", "1", "--jupyter", "--", "--ServerApp.root_dir=/data")
    with subprocess.Popen(words, env=env, cwd=own.work, stderr=subprocess.PIPE, text=True) as client:
        assert client.stderr is not None
        said = []
        while not said or "then open" not in said[-1]:
            said.append(client.stderr.readline())
            assert said[-1], said
        url = said[-1].split("then open: ")[1].strip()
        port, token = url.split(":")[2].split("/")[0], url.split("token=")[1]
        text = "".join(said)
        assert "job 1: it ends after 2:00:00 without computing; change that with --lease" in text
        at = f"{pwd.getpwuid(os.getuid()).pw_name}@{os.uname().nodename}"
        assert f"on your own computer: ssh -N -L {port}:127.0.0.1:{port} {at}\n" in text
        with urllib.request.urlopen(url, timeout=60) as answer:
            assert answer.read().decode().endswith("--ServerApp.port_retries=200 --ServerApp.root_dir=/data")
        found = json.loads(own.ok("gshow", "--json", "1"))["jobs"][0]
        assert (found["name"], found["foreground"]["lease_s"]) == ("jupyter", 7200)
        assert token not in json.dumps(found)
        assert token not in "".join(path.read_text() for path in own.work.glob("*.out"))
        assert token.encode() not in command_lines()
        client.send_signal(signal.SIGINT)
        client.communicate(timeout=60)


def command_lines() -> bytes:
    """Those of all processes; some of other tests end meanwhile."""
    found = b""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            found += path.read_bytes()
    return found


def test_without_jupyterlab_nothing_is_submitted_and_the_hint_says_what_to_do(own: Shell, tools: Path) -> None:
    result = own.type("grun", "--jupyter", PATH="/nowhere")
    assert "there is no jupyter in the PATH of the job" in result.err
    assert "activate the environment that has it, or install it there with: pip install jupyterlab" in result.err
    assert own.ok("gq", "-a", "--quiet") == ""


def test_a_jupyter_without_lab_is_told_apart(tmp_path: Path) -> None:
    (tmp_path / "jupyter").write_text("")
    (tmp_path / "jupyter").chmod(0o755)
    with pytest.raises(Refused, match="a jupyter, but no JupyterLab"):
        Notebook([], f":/nowhere:{tmp_path}")


@pytest.mark.parametrize("word", ["--IdentityProvider.token=x", "--ServerApp.token", "--NotebookApp.password=y"])
def test_a_secret_among_the_words_is_refused(word: str) -> None:
    with pytest.raises(UsageError, match="in the list of processes"):
        Notebook([word], "")


@pytest.mark.parametrize(
    ("pieces", "says"),
    [
        ((b"http://127.0.0.1:20001/lab?token=...",), "http://127.0.0.1:20001/lab?token="),
        ((b"x http://local", b"host:20", b"001/me/lab?tok", b"en=...\n"), "http://127.0.0.1:20001/me/lab?token="),
        ((b"y" * 10_000, b"https://n1:443/tree?token=...",), "https://127.0.0.1:443/tree?token="),
        ((b"http://127.0.0.1:20001/lab?token=5e0c", b"...") , None),
        ((b"see http://jupyter.org/lab",), None),
    ],
)  # fmt: skip
def test_the_address_is_found_wherever_the_output_is_cut(
    tmp_path: Path, pieces: tuple[bytes, ...], says: str | None
) -> None:
    for name in ("jupyter", "jupyter-lab"):
        (tmp_path / name).write_text("")
        (tmp_path / name).chmod(0o755)
    notebook = Notebook(["--collaborative"], str(tmp_path)).watch("lab2")
    lines = None
    for piece in pieces:
        lines = lines or notebook(piece)
    if says is None:
        assert lines is None
    else:
        assert lines is not None
        assert lines[1] == f"then open: {says}{notebook.token}"
        assert " -J " in lines[0]
        assert lines[0].endswith("@lab2")
    assert notebook.token not in " ".join(notebook.argv)
