"""The tree of gq --tree and the graphs of gshow."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from gpusched.cli.pipelines import DEEPEST, PLAIN, ROUND, arrange, dot, mermaid


def job(job_id: int, *above: int, pipeline: str | None = None, fallback_of: str | None = None) -> dict[str, Any]:
    depends_on = [str(one) for one in above]
    of = {"pipeline": pipeline, "fallback_of": fallback_of}
    return {"id": str(job_id), "depends_on": depends_on, "state": "PENDING", **of}


def drawn(jobs: list[dict[str, Any]], signs: tuple[str, str, str, str] = ROUND) -> list[str]:
    return [place.prefix + place.job["id"] for place in arrange(jobs, signs)]


def test_each_job_is_below_its_deepest_dependency() -> None:
    jobs = [job(1), job(2, 1), job(3, 2, 1), job(4, 1), job(5, 99), job(6)]
    assert drawn(jobs) == ["1", "├─ 2", "│  └─ 3", "└─ 4", "5", "6"]
    assert drawn(jobs, PLAIN) == ["1", "|- 2", "|  `- 3", "`- 4", "5", "6"]


def test_a_dependant_of_an_array_is_below_its_last_task() -> None:
    tasks = [{**job(0, 1), "id": f"2_{number}"} for number in range(3)]
    assert drawn([job(1), *tasks, job(5, 2)]) == ["1", "├─ 2_0", "├─ 2_1", "└─ 2_2", "   └─ 5"]
    assert drawn([job(1), job(2, 1), job(5, 2)]) == ["1", "└─ 2", "   └─ 5"]


def test_pipeline_steps_are_below_the_pipeline() -> None:
    jobs = [job(1), job(2, pipeline="p1"), job(3, 1), job(4, 2, pipeline="p1"), job(5, 1, pipeline="p1")]
    assert drawn(jobs) == ["1", "└─ 3", "p1", "├─ 2", "│  └─ 4", "└─ 5"]
    assert [(place.job["id"], place.parent, place.depth) for place in arrange(jobs)][2:] == [
        ("p1", None, 0),
        ("2", "p1", 1),
        ("4", "2", 2),
        ("5", "p1", 1),
    ]


def test_a_fallback_is_below_the_failed_job() -> None:
    jobs = [job(1, pipeline="p1"), job(2, 1, pipeline="p1"), job(3, pipeline="p1", fallback_of="1")]
    assert drawn(jobs) == ["p1", "└─ 1", "   ├─ 2", "   └─ 3"]
    assert drawn(jobs[1:]) == ["p1", "├─ 2", "└─ 3"]
    assert drawn([job(4), job(5, fallback_of="4")]) == ["4", "└─ 5"]


def test_a_long_chain_stays_in_view() -> None:
    jobs = [job(1), *(job(number, number - 1) for number in range(2, 1001))]
    lines = drawn(jobs)
    assert len(lines) == 1000
    assert max(map(len, lines)) <= 3 * (DEEPEST + 1) + 4


@given(st.lists(st.sets(st.integers(1, 30), max_size=3), max_size=30))
def test_every_job_is_shown_once_below_a_dependency(above: list[set[int]]) -> None:
    jobs = [job(at, *[one for one in ids if one < at]) for at, ids in enumerate(above, 1)]
    places = arrange(jobs)
    assert sorted(place.job["id"] for place in places) == sorted(one["id"] for one in jobs)
    for place in places:
        assert place.parent in (place.job["depends_on"] or [None])
    seen: set[str] = set()
    for place in places:
        assert place.parent is None or place.parent in seen
        seen.add(place.job["id"])


PIPELINE = {
    "name": 'a "b"',
    "steps": [
        {"step": "end", "id": "1", "state": "COMPLETED", "needs": []},
        {"step": "x.y", "id": "2", "state": "TIMEOUT", "needs": [{"kind": "afterok", "step": "end", "delay_s": 0}]},
        {
            "step": "z",
            "id": "3",
            "state": "COMPLETING",
            "needs": [
                {"kind": "after", "step": "x.y", "delay_s": 300},
                {"kind": "afterok", "step": None, "id": "77", "delay_s": 0},
            ],
        },
    ],
    "fallbacks": [{"step": "x.y", "id": "4", "state": "RUNNING"}],
}


def test_a_mermaid_graph_is_printed() -> None:
    assert mermaid(PIPELINE).splitlines() == [
        "flowchart TD",
        '    s1["end<br/>1 COMPLETED"]',
        '    s2["x.y<br/>2 TIMEOUT"]',
        '    s3["z<br/>3 COMPLETING"]',
        '    f1(["x.y: fallback<br/>4 RUNNING"])',
        "    s1 --> s2",
        "    s2 -->|after + 5 min| s3",
        "    s2 -.-> f1",
        "    style s1 fill:#b7e1cd",
        "    style s2 fill:#f4b6b6",
        "    style s3 fill:#a4c2f4",
        "    style f1 fill:#a4c2f4",
    ]


def test_a_graphviz_graph_is_printed() -> None:
    lines = dot(PIPELINE).splitlines()
    assert lines[0] == 'digraph "a \\"b\\"" {'
    assert '    "x.y" -> "z" [label="after + 5 min"];' in lines
    assert '    "end" [label="end\\n1 COMPLETED", fillcolor="#b7e1cd"];' in lines
    assert '    "fallback 4" [label="x.y: fallback\\n4 RUNNING", fillcolor="#a4c2f4"];' in lines
    assert '    "x.y" -> "fallback 4" [style=dashed];' in lines
    assert lines[-1] == "}"
