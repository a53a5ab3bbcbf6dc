"""Traces are read as they are meant, and what cannot be read is named in a sentence."""

from __future__ import annotations

import gzip

import pytest

from benchmarks.cases import EXAMPLES, example_names
from gpusched.addons.simulate.cluster import largest, nodes_of, read_nodes
from gpusched.addons.simulate.policies import request_of, rules_of
from gpusched.addons.simulate.trace import BadTrace, read_trace, with_estimates
from gpusched.errors import NotFound, UserError

SWF = """; MaxProcs: 8
1 10 -1 100 4 -1 -1 2 60 -1 1 7 -1 -1 3 -1 -1 -1
2 5 -1 50 4 -1 -1 -1 -1 -1 0 8 -1 -1 -1 -1 -1 -1
3 20 -1 0 4 -1 -1 4 60 -1 1 7 -1 -1 -1 -1 -1 -1
4 20 -1 30 9 -1 -1 9 60 -1 1 7 -1 -1 -1 -1 -1 -1
5 -3 -1 30 1 -1 -1 1 60 -1 1 7 -1 -1 -1 -1 -1 -1
6 30 -1 30 0 -1 -1 -1 60 -1 1 7 -1 -1 -1 -1 -1 -1
"""


def write(tmp_path, text, name):
    path = tmp_path / name
    path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    return path


@pytest.mark.parametrize("name", ["log.swf", "log.swf.gz", "log"])
def test_a_log_in_swf_is_read(tmp_path, name):
    trace = read_trace(write(tmp_path, SWF, name))
    first, second = trace.jobs
    assert (first.id, first.submit_s, first.run_s, first.procs, first.user, first.queue) == ("1", 10, 100, 2, "7", "3")
    assert first.estimate_s == 100, "never less than it ran"
    assert (second.procs, second.estimate_s, second.outcome) == (4, 50, "failed")
    assert trace.procs == 8
    assert {why: one.named for why, one in trace.dropped.items()} == {
        "did not run": ["3"],
        "requests more than the 8 processors of the machine": ["4"],
        "submitted before the trace begins": ["5"],
        "requests no processor": ["6"],
    }
    assert trace.notes == ["1 job submitted before the one above; each arrives at its own time"]


def test_a_table_with_time_limits_is_read(tmp_path):
    path = tmp_path / "jobs.csv"
    path.write_text("submit_s,duration_s,num_gpus,time_limit_s\n0,7200,1,600\n1,300,1,600\n2,600,1,600\n3,5,1,0\n")
    trace = read_trace(path)
    assert [(job.run_s, job.estimate_s, job.outcome) for job in trace.jobs] == [
        (600, 600, "timeout"),
        (300, 600, ""),
        (600, 600, ""),
    ]
    assert trace.dropped["has a time limit of less than a second"].count == 1
    path.write_text("submit_s,duration_s,num_gpus,time_limit_s\n0,7200,1,\n")
    with pytest.raises(BadTrace, match="line 2: time_limit_s is ''"):
        read_trace(path)


def test_a_table_of_gpu_jobs_is_read(tmp_path):
    text = "job_id,submit_s,duration_s,num_gpus,vc\na,0,50,12,x\nb,1,0,1,x\nc,2,5,0,x\nd,3,5,64,y\ne,-1,5,1,y\n"
    trace = read_trace(write(tmp_path, text, "jobs.csv.gz"))
    trace.keep_those_that_fit(gpus=32, procs=0)
    assert [(job.id, job.gpus, job.run_s, job.estimate_s, job.queue) for job in trace.jobs] == [("a", 12, 50, 50, "x")]
    assert {why: str(one) for why, one in trace.dropped.items()} == {
        "did not run": "1 (b)",
        "requests no GPU": "1 (c)",
        "requests more than the 32 GPUs of the cluster": "1 (d)",
        "submitted before the trace begins": "1 (e)",
    }
    wide = request_of(trace.jobs[0], nodes_of("4x8"))
    assert (wide.gpus, wide.nodes, wide.tail_gpus) == (8, 1, 4)


def test_omitted_jobs_are_counted_and_the_first_named(tmp_path):
    rows = "".join(f"j{number},0,0,1\n" for number in range(9))
    trace = read_trace(write(tmp_path, f"job_id,submit_s,duration_s,num_gpus\nok,0,1,1\n{rows}", "jobs.csv"))
    assert str(trace.dropped["did not run"]) == "9 (j0, j1, j2, j3, j4 and 4 more)"


def test_one_of_several_workloads_is_read(tmp_path):
    text = "workload,name,submit_s,application,num_gpus,jct_tiresias_s\n1,a,0,x,1,5\n2,b,0,x,1,6\n"
    path = write(tmp_path, text, "jobs.csv")
    assert [job.id for job in read_trace(path).jobs] == ["a"]
    assert [(job.id, job.run_s) for job in read_trace(path, workload=2).jobs] == [("b", 6)]


def test_tasks_that_share_gpus_are_read(tmp_path):
    text = "name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec\np,6000,1024,1,460,T4|P100\nq,500,512,2,1000,\n"
    first, second = read_trace(write(tmp_path, text, "pods.csv")).jobs
    assert (first.cpus, first.mem_mib, first.gpus, first.gpu_fraction, first.gpu_types) == (
        6.0,
        1024,
        1,
        0.46,
        ("T4", "P100"),
    )
    assert (second.cpus, second.gpus, second.gpu_fraction, second.gpu_types) == (0.5, 2, None, ())


def test_sacct_output_is_read(tmp_path):
    text = (
        "JobID|User|Partition|Submit|Start|End|Timelimit|ReqTRES|State|JobName\n"
        "12|ann|gpu|2026-01-01T00:00:10|2026-01-01T00:01:00|2026-01-01T01:01:00|1-00:00:00|"
        "cpu=4,mem=16G,gres/gpu=2|COMPLETED|train\n"
        "12.batch|||2026-01-01T00:00:10|2026-01-01T00:01:00|2026-01-01T01:01:00|||COMPLETED|batch\n"
        "13|bob|gpu|2026-01-01T00:00:00|2026-01-01T00:02:00|2026-01-01T00:03:00|UNLIMITED|cpu=1|FAILED|x\n"
        "14|bob|gpu|2026-01-01T00:00:20|Unknown|Unknown|10:00|cpu=1|CANCELLED by 7|x\n"
    )
    trace = read_trace(write(tmp_path, text, "log.txt"))
    first, second = trace.jobs
    assert (first.submit_s, first.run_s, first.estimate_s, first.gpus, first.cpus) == (10, 3600, 86400, 2, 4.0)
    assert (first.mem_mib, first.user, first.queue, first.name, first.outcome) == (
        16384,
        "ann",
        "gpu",
        "train",
        "completed",
    )
    assert (second.submit_s, second.run_s, second.estimate_s, second.gpus) == (0, 60, 60, 0)
    assert trace.dropped["did not run"].named == ["14"]


BAD = {
    "wrong number of columns": ("log.swf", "1 2 3\n", r"log.swf line 1 has 3 columns, a line of SWF has 18"),
    "no number": ("a.csv", "submit_s,duration_s,num_gpus\n0,soon,1\n", r"line 2: duration_s is 'soon', not a number"),
    "infinite": ("a.csv", "submit_s,duration_s,num_gpus\n0,inf,1\n", r"line 2: duration_s is 'inf', not a number"),
    "a column is missing": (
        "a.csv",
        "submit_s,num_gpus\n0,1\n",
        r"has no column duration_s; it has submit_s, num_gpus",
    ),
    "a row too short": ("a.csv", "submit_s,duration_s,num_gpus\n0,1\n", r"line 2 has 2 columns, its first line 3"),
    "empty": ("a.csv", "", r"a.csv is empty"),
    "no rows": ("a.csv", "submit_s,duration_s,num_gpus\n", r"a.csv holds no job to replay"),
    "only what is left out": (
        "log.swf",
        "1 0 -1 0 1 -1 -1 1 1 -1 1 7 -1 -1 -1 -1 -1 -1\n",
        r"log.swf holds no job to replay \(did not run: 1 \(1\)\)",
    ),
    "only comments": ("log.swf", "; MaxProcs: 8\n", r"log.swf holds no job to replay"),
    "sacct without instants": ("a.txt", "JobID|Submit\n1|x\n", r"has no column Start, End"),
    "no instant": ("a.txt", "JobID|Submit|Start|End\n1|x|y|z\n", r"line 2: 'x' is not a time"),
}


@pytest.mark.parametrize(("name", "text", "message"), BAD.values(), ids=BAD)
def test_an_unreadable_trace_is_refused_in_a_sentence(tmp_path, name, text, message):
    with pytest.raises(BadTrace, match=message) as caught:
        read_trace(write(tmp_path, text, name))
    assert "\n" not in caught.value.message
    assert caught.value.hint


@pytest.mark.parametrize("keep", [30, -9])
def test_a_truncated_gzip_is_refused(tmp_path, keep):
    path = tmp_path / "log.swf.gz"
    path.write_bytes(gzip.compress(SWF.encode() * 50)[:keep])
    with pytest.raises(BadTrace, match=r"log.swf.gz is cut short or damaged after line \d+"):
        read_trace(path)


def test_binary_and_missing_files_are_refused(tmp_path):
    (tmp_path / "a.csv").write_bytes(b"submit_s,\xff\xfe\n")
    with pytest.raises(BadTrace, match="line 1 is not text"):
        read_trace(tmp_path / "a.csv")
    with pytest.raises(NotFound, match="there is no trace"):
        read_trace(tmp_path / "b.csv")
    with pytest.raises(BadTrace, match="is a folder"):
        read_trace(tmp_path)


def test_a_cluster_that_fits_no_job_is_refused():
    trace = read_trace(EXAMPLES / "tiresias_60jobs.csv.gz")
    with pytest.raises(BadTrace, match="no job of tiresias_60jobs.csv.gz fits on the cluster"):
        trace.keep_those_that_fit(gpus=0, procs=0)


def test_clusters_are_read_by_name_and_file(tmp_path):
    nodes = nodes_of("12x8xA100-80GiB:64")
    assert (len(nodes), nodes[0].name, nodes[11].name, nodes[0].cpus) == (12, "node00", "node11", 64.0)
    assert {(gpu.name, gpu.vram_total_mib) for gpu in nodes[0].gpus} == {("A100", 81920)}
    assert largest(nodes_of("8x8")) == (64, 1_000_000)
    assert largest(nodes_of("100p")) == (0, 100)
    table = "sn,cpu_milli,memory_mib,gpu,model\nx,64000,1024,2,P100\n"
    (node,) = read_nodes(write(tmp_path, table, "nodes.csv.gz"))
    assert (node.name, node.cpus, node.mem_mib, len(node.gpus), node.gpus[0].name) == ("x", 64.0, 1024, 2, "P100")
    (node,) = read_nodes(write(tmp_path, '[{"name": "y", "cpus": 4, "mem_mib": 8, "gpus": 1}]', "nodes.json"))
    assert (node.name, node.cpus, len(node.gpus)) == ("y", 4.0, 1)


@pytest.mark.parametrize("text", ["8x0", "x8", "8", "0p", "eight", "8x8x"])
def test_an_invalid_cluster_is_refused(text):
    with pytest.raises(UserError):
        nodes_of(text)


@pytest.mark.parametrize("text", ["lifo", "fcfs+some", "fcfs/best/first", "fcfs+easy/worst"])
def test_an_invalid_policy_is_refused(text):
    with pytest.raises(UserError, match="names no"):
        rules_of(text)


def test_estimates_are_used_as_given_or_exact(tmp_path):
    jobs = read_trace(write(tmp_path, SWF.replace("2 60 -1 1 7", "2 600 -1 1 7"), "log.swf")).jobs
    assert [job.estimate_s for job in with_estimates(jobs, "given")] == [600, 50]
    assert [job.estimate_s for job in with_estimates(jobs, "exact")] == [100, 50]


def test_shipped_traces_are_listed():
    text = (EXAMPLES / "README.md").read_text("utf-8")
    assert all(name in text for name in example_names())
