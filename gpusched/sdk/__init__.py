"""gpusched for Python programs: a client with typed results, and an executor in the style of concurrent.futures.

The public names belong to the package `gpusched`, which loads them on first use.
"""
