"""Benchmarks that anyone can run: `python -m benchmarks NAME...`, or `all`, in a checkout.

Each prints its figures as median and p95 beside a floor measured in the same run on the same machine.
Nothing here is asserted by a test: absolute times belong to the machine, ratios to the reader.
"""
