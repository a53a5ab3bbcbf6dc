"""Reservations of the calendar: what is kept, when, for whom.

entries    when the windows of an entry are, which entries meet
conflicts  what stands in the way of a new entry
keeping    which cards a new entry takes
inside     windows in a cycle: a booking for others, a place for members
"""
