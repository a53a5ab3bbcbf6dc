"""Decisions, and nothing else: values in, values out.

    snapshot -> cycle.decide -> plan               what starts now, who makes room, why the rest waits
    job, run, event -> life.lifecycle -> job, run  what an event makes of a job

The cycle
    cycle         takes the waiting jobs in order: limit, start, preempt, reserve, or wait
    ordering      which job comes first; the whole orders by name
    factors       the factors of the weighted priority
    profile       who holds what until when, what is kept for whom, who may pass
    preemption    who makes room
    explain       why a job waits, as facts and a sentence
    extension     where plug-ins take part
    guards        what may turn a place down that has room
    invariants    what must hold in every snapshot

Placing
    draft         tentative bookings on a copy of the machines, with checkpoint and rollback
    amounts       the whole numbers in which parts of a node are booked
    need          a request in these
    placement     filter, then score: where a request fits; the nodes of a gang
    filters, scores, topology, constraints, fragmentation    its parts
    cells, cell_search    promised groups of linked cards
    ceilings      measured load against configured ceilings
    capacity, conditions, refusal    what can never fit, and the largest that would
    shortage      what is missing for a request to start now

Packages
    sharing       shares of accounts, queues with guarantees, limits
    calendar      reservations of the calendar
    ahead         estimates, and what would help
    life          the states of one job

Nothing here reads a clock, a file, the environment or a random number; time is a field of what is
handed in, so equal inputs give equal answers in the daemon, in dry runs and in tests.
"""
