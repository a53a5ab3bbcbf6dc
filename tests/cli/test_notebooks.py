"""The recipe for notebooks, as it is printed, with a small server in place of Jupyter's."""

from __future__ import annotations

import re
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from screen import Screen
from shell import Shell
from support import wait_until

RECIPE = Path(__file__).resolve().parents[2] / "docs" / "howto" / "notebooks.md"

SERVER = """#!/usr/bin/env python3
import http.server, os, sys
assert sys.argv[1:3] == ["lab", "--no-browser"], sys.argv
options = dict(word[2:].split("=", 1) for word in sys.argv[3:])
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path.endswith("?token=secret") else 403)
        self.end_headers()
        self.wfile.write(os.environ["CUDA_VISIBLE_DEVICES"].encode())
    def log_message(self, *_):
        pass
server = http.server.HTTPServer((options["ip"], int(options["port"])), Handler)
print(f"    http://{options['ip']}:{server.server_port}/lab?token=secret", flush=True)
try:
    server.serve_forever()
except KeyboardInterrupt:
    # As the real one: without a terminal it does not ask.
    if not sys.stdin.isatty() or input("Shut down (y/[n])? ") != "y":
        sys.exit(3)
"""


@pytest.fixture
def path(sh: Shell, tmp_path: Path) -> str:
    """A PATH on which jupyter is the stand-in."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "jupyter").write_text(SERVER)
    (folder / "jupyter").chmod(0o755)
    return f"{folder}:{sh.env['PATH']}"


def code_of(address: str) -> int:
    try:
        with urllib.request.urlopen(address, timeout=10) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code
    except urllib.error.URLError:
        return 0


def address_in(text: str) -> str:
    found = re.search(r"^ +(http://\S+)\s*$", text, re.M)
    return found.group(1) if found else ""


def test_the_script_serves_with_a_token_on_the_tunnel_port(sh: Shell, path: str) -> None:
    script = re.findall(r"```sh\n(.*?)```", RECIPE.read_text(), re.S)[0]
    (sh.work / "notebook.sh").write_text(script)
    assert "(umask 077; gsub notebook.sh)" in RECIPE.read_text()
    job_id = sh.ok("gsub", "--parsable", "notebook.sh", PATH=path).strip()
    wait_until(lambda: address_in(sh.type("glogs", job_id).out), what="the address")
    text = sh.ok("glogs", job_id)
    address = address_in(text)
    port = re.search(r"ssh -N -L 8888:127\.0\.0\.1:(\d+) \S+@\S+$", text, re.M)
    assert port is not None
    assert f":{port.group(1)}/" in address
    assert code_of(address) == 200
    assert code_of(address.replace("secret", "guess")) == 403
    with urllib.request.urlopen(address, timeout=10) as answer:
        assert answer.read().decode().isdigit()
    sh.ok("gcancel", job_id)
    sh.type("gwait", "--timeout", "30s", job_id)
    assert code_of(address) == 0


def test_the_foreground_command_prints_the_address_and_ends_with_its_client(sh: Shell, path: str) -> None:
    (line,) = re.findall(r"\$ grun (.*jupyter.*)", RECIPE.read_text())
    # The port of the recipe may be taken on the machine of the test.
    words = [word.replace("=8899", "=0") if word.startswith("--port") else word for word in line.split()]
    with Screen(sh, "grun", *words, PATH=path) as screen:
        address = address_in(screen.see("?token=secret"))
        assert code_of(address) == 200
        screen.press("\x03")
        screen.see("Shut down (y/[n])? ")
        screen.press("y\r")
        assert screen.end() == 0
    assert code_of(address) == 0
