"""Placement strategies: each scores placements, selected by [placement] strategy."""
