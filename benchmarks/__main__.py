"""`python -m benchmarks [NAME...]`: run benchmarks by name, or all of them."""

from __future__ import annotations

import sys
from collections.abc import Callable

from benchmarks import (
    agents,
    arrays,
    batch,
    board,
    drain,
    engine,
    latency,
    looks,
    memory,
    nodes,
    page,
    policy,
    prompt,
    ratchet,
    ray,
    scale,
    simulate,
    slurm,
    store,
    supervisors,
    units,
    workflow,
)
from benchmarks.harness import machine

BENCHES: dict[str, Callable[[], object]] = {
    "arrays": arrays.main,
    "batch": batch.main,
    "board": board.main,
    "page": page.main,
    "looks": looks.main,
    "latency": latency.main,
    "drain": drain.main,
    "prompt": prompt.main,
    "ratchet": ratchet.main,
    "slurm": slurm.main,
    "memory": memory.main,
    "engine": engine.main,
    "agents": agents.main,
    "ray": ray.main,
    "supervisors": supervisors.main,
    "units": units.main,
    "policy": policy.main,
    "nodes": nodes.main,
    "scale": scale.main,
    "simulate": simulate.main,
    "store": store.main,
    "workflow": workflow.main,
}


def main(names: list[str]) -> int:
    """Run these, in order; all without names. Options after `ratchet` are its own. Returns the process exit code."""
    if names[:1] == ["ratchet"]:
        return ratchet.main(names[1:])
    wanted = names or ["all"]
    if wanted == ["all"]:
        wanted = list(BENCHES)
    unknown = [name for name in wanted if name not in BENCHES]
    if unknown:
        print(f"no benchmark {unknown[0]!r}; there are: {', '.join(BENCHES)}, all", file=sys.stderr)
        return 2
    print(machine())
    for name in wanted:
        print(f"\n== {name}")
        BENCHES[name]()
    print(f"\n{machine()}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
