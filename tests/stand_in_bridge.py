"""Takes the place of the bridge to Ray: nodes by a file, agents as children of its own.

usage: stand_in_bridge.py ROOT [WORD...]    ROOT/nodes.json: {NAME: [ADDRESS, ID]}; ROOT/NAME: home of a node;
ROOT/bridge.pid. The words start an agent, with PID_FILE for where it writes its process id, see `warm_agents`.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path

AGENT = 'import sys; sys.argv[0] = "gpusched"; from gpusched.cli.admin import main; sys.exit(main())'


class StandIn:
    def __init__(self, root: Path, control: socket.socket, words: list[str]) -> None:
        self.root, self.control, self.words = root, control, words
        self.agents: dict[str, tuple[str, subprocess.Popen[bytes]]] = {}
        """With the id of the node at their start."""

    def serve(self) -> None:
        (self.root / "bridge.new").write_text(str(os.getpid()))
        (self.root / "bridge.new").rename(self.root / "bridge.pid")
        while True:
            nodes = json.loads((self.root / "nodes.json").read_text())
            self.tell({"nodes": [[name, *rest] for name, rest in nodes.items()]})
            for name, (node_id, agent) in list(self.agents.items()):
                if nodes.get(name, ["", ""])[1] != node_id:
                    # Its relay died with the raylet, which takes the agent along.
                    agent.kill()
                if agent.poll() is not None:
                    del self.agents[name]
                    self.tell({"closed": name, "why": f"{name}: the agent ended with {agent.returncode}"})
            if select.select([self.control], [], [], 0.1)[0]:
                data, fds, _, _ = socket.recv_fds(self.control, 1 << 16, 1)
                if not data:
                    return
                self.open(json.loads(data)["open"], socket.socket(fileno=fds[0]), nodes)

    def tell(self, message: object) -> None:
        self.control.send(json.dumps(message).encode())

    def open(self, name: str, stream: socket.socket, nodes: dict[str, list[str]]) -> None:
        with stream:
            if name in self.agents:
                self.agents[name][1].kill()
                self.agents.pop(name)[1].wait()
            home = self.root / name
            env = {**os.environ, "GPUSCHED_HOME": str(home), "GPUSCHED_FAKE_GPUS": str(home / "gpus.json")}
            pid_file = self.root / f"{name}.pid"
            words = [str(pid_file) if word == "PID_FILE" else word for word in self.words]
            agent = subprocess.Popen(
                [*(words or [sys.executable, "-c", AGENT, "agent"]), name, "--address", nodes[name][0]],
                stdin=stream,
                stdout=stream,
                env=env,
                start_new_session=True,
            )
            if not words:
                (self.root / f"{name}.new").write_text(str(agent.pid))
                (self.root / f"{name}.new").rename(pid_file)
            self.agents[name] = nodes[name][1], agent
            self.tell({"opened": name})


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    StandIn(Path(sys.argv[1]), socket.socket(fileno=os.dup(0)), sys.argv[2:]).serve()
