"""Nodes reached through Ray: membership, a restarted relay per node, authenticated calls; frames as over any channel.

Ray is disposable. It starts no job and stores nothing of ours: killing all of it costs no run and no exit code.

    site       what this machine is in a Ray cluster: its file, its token, how its raylet is started
    keeper     keeps the raylet of this machine running
    probe      asks a head whom it admits, which Ray it runs and which nodes it has; a separate process
    relay      the detached actor on each node: starts the node's agent and passes its streams on
    bridge     the Ray driver: a child of the daemon, since Ray ends the process that it is loaded into
    link       the daemon's side of the bridge, and a channel to each node
    members    what the daemon asks of it: which nodes there are, and a channel to each

Between daemon and bridge, on a socket of packets:

    daemon -> bridge    {"open": NODE} with a stream socket attached, which the bridge connects to the agent of NODE
    bridge -> daemon    {"nodes": [[NAME, ADDRESS, NODE ID], ...]} every second: nodes that Ray believes alive
                        {"trouble": SENTENCE or null}: why there is no membership now
                        {"opened": NODE}: the last stream to this node has an agent at its other end
                        {"closed": NODE, "why": SENTENCE}: the last stream to this node has ended
"""

ENTRY_POINTS = {
    "engine.ray": "gpusched.addons.ray.members:open_members",
    "command.cluster": "gpusched.addons.ray.cluster_commands:app",
}
