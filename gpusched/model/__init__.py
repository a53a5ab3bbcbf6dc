"""Values and enumerations shared by every part: arithmetic and validation, no behaviour.

The package itself imports nothing, so that command-line clients can load `model.units` and `model.states` alone.
"""
