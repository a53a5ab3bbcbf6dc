"""gpusched for Python programs: clients with typed results, and what jobs of executors and notebooks run.

The public names belong to the package `gpusched`, which loads them on first use.
"""
