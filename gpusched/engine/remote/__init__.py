"""Runs on other machines: the same engine there, behind an agent, and its proxy here.

On the head:

    remote_engine    RemoteEngine: the engine of another machine, as the daemon sees it
    replica          the states in which its runs are to be, by version, and what the node has told of them

On the node:

    node_agent       NodeAgent: keeps the machine's engine in line with them
    journal          what the agent knows after its death
    agent_server     serves an agent on an event loop
    services         output and connections for the head's streams
    command_door     the socket by which programs of jobs there reach the head

Between them:

    messages         the request and the reply
    channel          how frames travel; may lose, delay, duplicate and reorder them
    command_channel  a channel over a command such as ssh
    streams          numbered streams of bytes in the same channel; `relay` connects them to sockets
"""
