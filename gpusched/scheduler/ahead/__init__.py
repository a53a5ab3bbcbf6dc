"""The future, played with the same `decide`: when jobs start, and what would make them start sooner.

future      decide, let the starts run, move to the next end, decide again
again       what a preempted job waits for
estimates   a start as a range, and how good such ranges have been
place       a job's place in the queue
whatif      what would make a job start now
changes     the changes that are tried
trial       one change, planned
"""
