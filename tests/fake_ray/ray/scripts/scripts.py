from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import sys

from ray._raylet import ROOT


def change(name: str, entry: list[str] | None) -> None:
    nodes = json.loads((ROOT / "nodes.json").read_text())
    nodes.pop(name, None)
    if entry is not None:
        nodes[name] = entry
    (ROOT / f"{os.getpid()}.new").write_text(json.dumps(nodes))
    (ROOT / f"{os.getpid()}.new").rename(ROOT / "nodes.json")


def main(argv: list[str]) -> None:
    given = dict(word.removeprefix("--").partition("=")[::2] for word in argv if word.startswith("--"))
    assert argv[0] == "start"
    assert "block" in given
    assert os.environ["RAY_AUTH_MODE"] == "token"
    if (ROOT / "broken").exists():
        print("RuntimeError: there is no room for Ray here", flush=True)
        sys.exit(1)
    name, address = given["node-name"], given["node-ip-address"]
    server = None
    if "head" in given:
        shutil.copy(os.environ["RAY_AUTH_TOKEN_PATH"], ROOT / "token")
        os.makedirs(os.environ["RAY_gcs_storage_path"], exist_ok=True)  # noqa: SIM112  Ray's own spelling
        server = socket.create_server((address, int(given["port"])))
        (ROOT / "head.json").write_text(json.dumps([name, address]))
    else:
        change(name, [address, str(os.getpid())])
    try:
        signal.sigwait({signal.SIGTERM})
    finally:
        if server is not None:
            (ROOT / "head.json").unlink()
        else:
            change(name, None)


if __name__ == "__main__":
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    main(sys.argv[1:])
