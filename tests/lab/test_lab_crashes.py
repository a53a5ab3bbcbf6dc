"""Machines that lose their link, their power or any process of the scheduler: no job is lost, and none runs twice."""

from __future__ import annotations

import sys

from lab_cluster import Cluster


def test_jobs_run_on_every_machine(cluster: Cluster) -> None:
    jobs = [cluster.on(name, "hostname; exit 7") for name in cluster.names]
    ended = cluster.head.wait(*jobs)
    assert [job["exit_code"] for job in ended] == [7, 7, 7]
    assert [cluster.head.output(job).strip() for job in jobs] == cluster.names


def test_commands_are_typed_on_the_head(cluster: Cluster) -> None:
    done = cluster.command("gsub", "--wait", "-w", "n2", "--", "sh", "-c", "hostname; exit 3", check=False)
    assert done.returncode == 3
    assert "n3" in cluster.command("ginfo").stdout


MEET = """
import os, socket
address, port, rank = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), os.environ["NODE_RANK"]
if rank == "0":
    server = socket.create_server(("", port))
    print("met", server.accept()[0].recv(99).decode())
else:
    for _ in range(600):
        try:
            with socket.create_connection((address, port), 10) as stream:
                stream.sendall(socket.gethostname().encode())
            break
        except ConnectionRefusedError:
            __import__("time").sleep(0.05)
    else:
        raise SystemExit(f"nobody at {address}:{port}")
"""


def test_the_nodes_of_a_gang_meet_at_the_first_one(cluster: Cluster) -> None:
    job = cluster.head.submit(sys.executable, "-c", MEET, nodes=2, gpus=4, nodelist=["n2", "n3"])
    (ended,) = cluster.head.wait(job)
    assert (ended["state"], ended["node"]) == ("COMPLETED", "n[2-3]")
    assert cluster.head.output(job) == "met n3\n"
