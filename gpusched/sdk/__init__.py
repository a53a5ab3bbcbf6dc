"""gpusched from Python programs: a client with typed results, and an executor like those of concurrent.futures.

Its public names are those of the package `gpusched`, which loads them when they are first used.
"""
