"""The one clock: what comes first at an instant, and that nothing is left out or seen twice."""

from __future__ import annotations

from math import inf

from gpusched.addons.simulate.event_loop import play


class Scripted:
    """A body with events of its own at given instants, which writes down what it is told."""

    def __init__(self, events):
        self.events, self.seen = sorted(events), []

    def next_at(self, arrives_at):
        return min([arrives_at, *self.events[:1]])

    def advance(self, now):
        self.seen.append(("now", now))
        while self.events and self.events[0] <= now:
            self.seen.append(("ends", self.events.pop(0)))

    def arrive(self, job):
        self.seen.append(("arrives", job))

    def settle(self, now):
        self.seen.append(("plans", now))


def test_an_instant_processes_ends_then_arrivals_then_one_plan():
    body = Scripted([5, 9])
    assert play([5, 2, 5], body) == 3
    assert body.seen == [
        *(("now", 2), ("arrives", 1), ("plans", 2)),
        *(("now", 5), ("ends", 5), ("arrives", 0), ("arrives", 2), ("plans", 5)),
        *(("now", 9), ("ends", 9), ("plans", 9)),
    ]


def test_a_loop_without_events_ends_at_once():
    body = Scripted([])
    assert play([], body) == 0
    assert body.next_at(inf) == inf


def test_progress_counts_arrivals():
    told = []
    play(range(2000), Scripted([]), lambda done, of: told.append((done, of)))
    assert told
    assert told == sorted(told)
    assert all(0 < done <= of == 2000 for done, of in told)
