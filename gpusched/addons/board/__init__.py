"""The board: what the page and gtop watch, kept up to date for all of their viewers at once.

query      as viewers ask for it and hold it: filters, orders, versions put together; without the daemon
board      in the daemon: a round a second at most for all viewers, and what has changed for each
"""

ENTRY_POINTS = {
    "attach.board": "gpusched.addons.board.handler:attach",
    "routes.board": "gpusched.addons.board.handler:ROUTES",
}
