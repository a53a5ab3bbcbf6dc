"""Statements of a month: what accounts and users held, used and may still use, worked out from the daemon's records.

handler    in the daemon: the sums of the month
command    `ghist --statement`: as table, CSV, JSON or page to print
"""

ENTRY_POINTS = {
    "routes.statement": "gpusched.addons.statement.handler:ROUTES",
    "ghist.statement": "gpusched.addons.statement.command:show_statement",
}
