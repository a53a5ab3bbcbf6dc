"""A driver of the stand-in for Ray: has a task run on every node of the cluster once all of them are there."""

from __future__ import annotations

import sys

from stand_ins import connect, hear, report, say

address, nodes = sys.argv[1], int(sys.argv[2])
host, _, port = address.rpartition(":")
with connect(host, int(port)) as stream:
    say(stream, {"await_nodes": nodes})
    found = hear(stream)
if found is None:
    sys.exit("the head of Ray is gone")
report(found)
