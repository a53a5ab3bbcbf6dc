"""Runs on other machines: the same engine there, behind an agent, and its proxy here.

On the head:

    remote_engine    RemoteEngine: the engine of another machine, as the daemon sees it
    replica          what the head knows of the runs there

On the node:

    node_agent       NodeAgent: applies the head's operations to the machine's engine, each exactly once
    journal          what the agent knows after its death
    agent_server     serves an agent on an event loop

Between them:

    messages         the request and the reply
    channel          how frames travel; may lose, delay, duplicate and reorder them
"""
