"""`gpusched mcp`: the scheduler as tools of an agent, over the Model Context Protocol.

It runs as its user and asks the daemon as any other client does, so an agent may do what its user may do, at most.
"""

ENTRY_POINTS = {
    "command.mcp": "gpusched.addons.mcp.command:mcp",
}
