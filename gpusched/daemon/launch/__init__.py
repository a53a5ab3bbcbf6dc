"""Turns a job and its placement into a ticket that an engine can start."""
