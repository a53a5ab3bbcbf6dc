"""The benchmark of placements reads the public format and fills a cluster."""

from __future__ import annotations

import gzip

import pytest

from gpusched.bench import placement
from gpusched.model.job import Request

NODES = "sn,cpu_milli,memory_mib,gpu,model\na,8000,4096,2,T4\nb,4000,4096,1,V100\n"
PODS = (
    "name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,qos\n"
    "p0,1000,10,1,500,,LS\np1,1000,10,1,1000,V100|P100,LS\np2,2000,20,0,0,,BE\np3,1000,10,2,1000,T4,LS\n"
)


def test_the_public_format_is_read(tmp_path):
    (tmp_path / "nodes.csv").write_text(NODES)
    (tmp_path / "pods.csv.gz").write_bytes(gzip.compress(PODS.encode()))
    nodes = placement.read_nodes(placement.read_table(tmp_path / "nodes.csv"))
    assert [(node.cpus, node.mem_mib, len(node.gpus), node.labels) for node in nodes] == [
        (8.0, 4096, 2, ("T4",)),
        (4.0, 4096, 1, ("V100",)),
    ]
    jobs = placement.read_jobs(placement.read_table(tmp_path / "pods.csv.gz"))
    assert jobs == [
        Request(1, gpu_fraction=0.5, cpus=1.0, mem_mib=10),
        Request(1, cpus=1.0, mem_mib=10, constraint="V100|P100"),
        Request(0, cpus=2.0, mem_mib=20),
        Request(2, cpus=1.0, mem_mib=10, constraint="T4"),
    ]
    assert sum(map(placement.gpus_asked, jobs)) == 3.5


def test_arrivals_ask_for_as_much_as_is_wanted_in_an_order_of_their_own():
    jobs = [Request(1), Request(2)]
    made = placement.arrivals(jobs, 30.0, seed=1)
    assert 30 <= sum(map(placement.gpus_asked, made)) < 32
    assert made == placement.arrivals(jobs, 30.0, seed=1)
    assert made != placement.arrivals(jobs, 30.0, seed=2)
    assert len(placement.arrivals([Request(1)] * 100, 30.0, seed=1)) == 30


@pytest.mark.parametrize("strategy", placement.STRATEGIES)
def test_a_cluster_is_filled_and_what_does_not_fit_is_dropped(strategy):
    nodes = placement.read_nodes(
        [{"cpu_milli": "8000", "memory_mib": "100", "gpu": "2", "model": "T4"} for _ in range(2)]
    )
    jobs = [Request(1, gpu_fraction=0.5)] * 4 + [Request(2)] * 2 + [Request(1)] * 3
    filled = placement.fill(nodes, jobs, strategy, placement.usual(jobs, 20))
    assert filled.placed + filled.dropped == len(jobs)
    # Spreading halves over all cards leaves no two for the wide job.
    expected = (0.5, 0.5) if strategy == "spread" else (1.0, 1.0)
    assert (filled.at_full, filled.at_end) == expected


def test_the_comparison_prints_a_line_for_each_strategy(capsys):
    nodes, jobs = placement.made_up()
    found = placement.compare(nodes[:4], jobs[:60], strategies=("first", "fgd"))
    assert found.keys() == {"first", "fgd"}
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:]] == ["first", "fgd"]


def test_one_file_alone_is_refused(capsys):
    with pytest.raises(SystemExit):
        placement.main(["nodes.csv"])
    assert "give two files" in capsys.readouterr().err
