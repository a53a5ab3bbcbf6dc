"""Placement strategies: what each makes of a place, by the name in [placement] strategy."""
