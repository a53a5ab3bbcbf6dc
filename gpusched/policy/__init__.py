"""Decisions, and nothing else: values in, values out.

    snapshot -> cycle.decide -> plan          what starts now, what is kept free, why the rest waits
    job, run, event -> lifecycle -> job, run  what an event makes of a job

    cycle         the actions of one cycle, in order
    ordering      which job comes first
    draft         tentative bookings on a copy of the machines, with checkpoint and rollback
    placement     filter, then score: where a request fits
    ceilings      measured load against configured ceilings
    backfill      the reservation of the first blocked job, and who may pass it
    explain       why a job waits, as facts and a sentence
    capacity      what can never fit, and the largest that would
    lifecycle     the table of state transitions
    retry         which failures are tried again, and when
    dependencies  afterok:1:2 and its kin
    invariants    what must hold in every snapshot

Nothing here reads a clock, a file, the environment or a random number; time is a field of what is
handed in, so equal inputs give equal answers in the daemon, in dry runs and in tests.
"""
