"""Values and enumerations that every part shares; arithmetic and validation, no behaviour.

The package itself imports nothing: clients at the prompt use `model.units` and `model.states` alone.
"""
