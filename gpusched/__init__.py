"""gpusched: a batch scheduler for shared GPU servers ("Slurm-lite").

Kept free of imports: the command-line clients import this package at every prompt.
"""

__version__ = "0.1.0"
