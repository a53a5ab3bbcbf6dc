"""What becomes of one job: events in, new values out.

lifecycle     what an event makes of a job and its run
transitions   the table of legal moves
yielding      runs that make room, stand still, go on
retry         which failures are tried again, and when
dependencies  afterok:1:2 and its kin
"""
