"""Monitoring beside the queue: GPUs, processes, files, and the history of ended jobs."""
