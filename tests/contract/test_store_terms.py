"""All that a submission says of nodes and terms comes back from the job table, also after it was opened anew."""

from __future__ import annotations

from pathlib import Path

from gpusched.model.job import (
    AdoptedProcess,
    Alerting,
    ArraySpec,
    Bundles,
    ClientProcess,
    Interactive,
    JobSpec,
    Request,
    TaskLayout,
    Variant,
)
from gpusched.model.value import fields, replace
from gpusched.ports import Changes, JobFilter
from gpusched.store import rows
from gpusched.store.sqlite import SqliteStore
from gpusched.testing import NOW, job

FULL = Request(
    gpus=2,
    nodes=3,
    tail_gpus=1,
    is_linked=True,
    is_exclusive=True,
    constraint="a&!b",
    prefer="zoë",
    near=("coco", "zoë"),
    nodelist=("lab1", "lab2", "lab3"),
    exclude=("lab4",),
    licenses=(("ansys", 1), ("matlab", 2)),
    resources=(("scratch", 3),),
    sm_percent=30,
    runtime="podman",
    image_nodes=("lab1", "lab2"),
    bundles=Bundles(7, 4, 5, 1, 0, 0.0, 0.5, 2.0, 100),
)
TERMS = {
    "qos": "high",
    "account_label": "zoë",
    "qos_label": "high",
    "deadline_at": NOW + 9,
    "reservation": "course",
    "array": ArraySpec("0-9:3", 4, 0, (("lr", ("1e-3", "1e-4")), ("zoë", ("1",)))),
    "fallback": "echo \udcff",
    "alerting": Alerting(("end", "fail"), ("mail",)),
    "interactive": Interactive(True, True, 600, ClientProcess(4711, 99, "boot")),
    "key": "sweep-\udcff",
    "snapshot": "s1",
    "pipeline": "p1",
    "step": "train",
    "ignore_idle": True,
    "never_satisfied": "wait",
    "fallback_of": 6,
    "time_limit_source": "auto",
    "adopted": AdoptedProcess(4711, 99, "boot"),
    "layout": TaskLayout(4, 2, 1, None, None, None, 100, 2, 0.5, True, 16),
    "comment": "two words \udcff",
    "wckey": "zoë",
    "if_infeasible": "wait",
    "engine": "local",
    "burst": True,
    "start_when": "green",
    "image_job": 40,
    "is_pull": True,
    "variants": (
        Variant(FULL, TaskLayout(4, 2, 1, None, None, None, 100, 2, 0.5, True, 16), 60, "auto", ("gpus", "gpu_type")),
        Variant(Request(cpus=2.0, mem_mib=100, gpus=1, gpu_type="zoë")),
    ),
}
PLACE = {"array_id": 7, "task": 3, "tasks_left": "6-9:3", "fallback_id": 8}


def test_nodes_and_terms_round_trip(tmp_path: Path) -> None:
    made = replace(job(1, request=FULL, **TERMS), **PLACE)
    plain = job(2)
    store = SqliteStore.open(tmp_path / "gpusched.db")
    store.commit(Changes(jobs={1: made, 2: plain}))
    store.close()
    store = SqliteStore.open(tmp_path / "gpusched.db")
    assert store.load_active()[0] == [made, plain]
    changed = replace(made, spec=replace(made.spec, request=replace(FULL, nodes=1, tail_gpus=0, licenses=()), qos=""))
    store.commit(Changes(jobs={1: changed}))
    assert store.jobs(JobFilter(ids=frozenset({1}))) == [changed]
    store.close()


def test_every_field_is_covered_above() -> None:
    default = Request()
    shares = {"gpu_fraction", "gpu_type", "vram_mib", "min_vram_mib", "cpus", "mem_mib"}
    same = {item.name for item in fields(Request) if getattr(FULL, item.name) == getattr(default, item.name)}
    assert same == shares
    assert TERMS.keys() <= {*JobSpec.__struct_fields__}
    assert set(rows.EXTRAS) <= TERMS.keys()
