"""Whatever is wrong with a trace, or with what else is given, `gpusched simulate` says it in a sentence."""

from __future__ import annotations

import gzip
import json
import os
import random
import re

import pytest

from benchmarks.cases import EXAMPLES
from gpusched.addons.simulate.trace import read_trace
from gpusched.cli.admin import main
from gpusched.errors import UserError

HEAD = "job_id,submit_s,duration_s,num_gpus\n"
SWF_LINE = "{} {} -1 {} 2 -1 -1 {} 60 -1 1 7 -1 -1 3 -1 -1 -1\n"


@pytest.fixture
def typed(monkeypatch, capsys, tmp_path):
    """Runs the command on a file with these bytes; gives exit code, output and the lines of stderr."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GPUSCHED_HOME", str(tmp_path / "home"))

    def run(name: str, body: bytes | str | None, *words: str):
        if body is not None:
            (tmp_path / name).write_bytes(body if isinstance(body, bytes) else body.encode())
        monkeypatch.setattr("sys.argv", ["gpusched", "simulate", name, *(words or ("--nodes", "2x4"))])
        code = main()
        shown = capsys.readouterr()
        assert "Traceback" not in shown.err
        return code, shown.out, shown.err.splitlines()

    return run


PACKED = gzip.compress((HEAD + "a,0,5,1\n" * 500).encode())
BAD = {
    "truncated": ("a.csv.gz", PACKED[:-12], r"a.csv.gz is cut short or damaged after line \d+"),
    "truncated at once": ("a.csv.gz", PACKED[:8], "a.csv.gz is cut short or damaged after line 0"),
    "damaged": ("a.csv.gz", PACKED[:40] + b"\0\0\0" + PACKED[43:], "a.csv.gz is cut short or damaged after line"),
    "a column is missing": (
        "a.csv",
        "job_id,submit_s,num_gpus\na,0,1\n",
        "a.csv has no column duration_s; it has job_id",
    ),
    "a column is misspelt": (
        "a.csv",
        "job_id,submit_s,duration_s,num_gpus,usr\na,0,5,1,ann\n",
        "a.csv has a column 'usr'; did you mean user",
    ),
    "a column has a blank": (
        "a.csv",
        "job_id,submit_s,duration_s,num_gpus, queue\na,0,5,1,q\n",
        "a.csv has a column ' queue'; did you mean queue",
    ),
    "a wanted column is misspelt": (
        "a.csv",
        "job_id,submit_s,durations,num_gpus\na,0,5,1\n",
        "a.csv has a column 'durations'; did you mean duration_s",
    ),
    "a column of pods is misspelt": (
        "pods.csv",
        "name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_specs\na,1000,1,1,1000,A100\n",
        "pods.csv has a column 'gpu_specs'; did you mean gpu_spec",
    ),
    "two columns of one name": (
        "a.csv",
        "job_id,submit_s,duration_s,num_gpus,user,user\na,0,5,1,ann,bob\n",
        "a.csv has two columns 'user'",
    ),
    "a row is short": ("a.csv", HEAD + "a,0,5\n", "a.csv line 2 has 3 columns, its first line 4"),
    "SWF is short": ("a.swf", "1 0 -1 5\n", "a.swf line 1 has 4 columns, a line of SWF has 18"),
    "sacct is short": ("a.txt", "JobID|Submit|Start|End\n1|2\n", "a.txt line 2 has 2 columns, its first line 4"),
    "something else": ("a.csv", "<html>\n<p>not found</p>\n", "a.csv has no column duration_s, num_gpus, submit_s"),
    "empty": ("a.csv", "", "a.csv is empty"),
    "an empty gzip": ("a.csv.gz", gzip.compress(b""), "a.csv.gz is empty"),
    "only a heading": ("a.csv", HEAD, "a.csv holds no job to replay"),
    "not UTF-8": ("a.csv", HEAD.encode() + b"\xe4,0,5,1\n", "a.csv line 2 is not text in UTF-8"),
    "NUL": ("a.csv", HEAD + "a\0,0,soon,1\n", "a.csv line 2"),
    "a field without an end": ("a.csv", HEAD + f'"{"x" * 200_000}",0,5,1\n', "a.csv line 2 is not a row of a table"),
    "NaN": ("a.csv", HEAD + "a,0,nan,1\n", "a.csv line 2: duration_s is 'nan', not a number"),
    "infinite": ("a.csv", HEAD + "a,-inf,1,1\n", "a.csv line 2: submit_s is '-inf', not a number"),
    "huge": ("a.csv", HEAD + "a,0,1e300,1\n", "a.csv line 2: duration_s is 1e300, which is out of range"),
    "huge and whole": ("a.csv", HEAD + f"a,{'9' * 400},5,1\n", "a.csv line 2: submit_s is 9+.*, which is out of range"),
    "digits without end": ("a.csv", HEAD + f"a,{'9' * 9000},5,1\n", "a.csv line 2: submit_s is '9+.*', not a number"),
    "huge in SWF": ("a.swf", SWF_LINE.format(1, 0, "1" + "0" * 30, 2), "line 1: the run time is 10+.*out of range"),
    "resources of sacct": (
        "a.txt",
        "JobID|Submit|Start|End|ReqTRES\n1|100|110|120|gres/gpu=two\n",
        "a.txt line 2: 'gres/gpu=two' is not a list of resources",
    ),
    "infinite memory of sacct": (
        "a.txt",
        "JobID|Submit|Start|End|ReqTRES\n1|100|110|120|mem=infG\n",
        "a.txt line 2: 'mem=infG' is not a list of resources",
    ),
    "a span of sacct": (
        "a.txt",
        "JobID|Submit|Start|Elapsed\n1|100|110|1e30:00:00\n",
        "a.txt line 2: '1e30:00:00' is not a duration",
    ),
    "nothing fits": ("a.csv", HEAD + "a,0,5,9\nb,0,5,16\n", "no job of a.csv fits on the cluster"),
}


@pytest.mark.parametrize(("name", "body", "message"), BAD.values(), ids=BAD)
def test_an_unreplayable_trace_is_refused_in_a_sentence_with_a_next_step(typed, name, body, message):
    code, out, err = typed(name, body)
    assert (code, out) == (1, "")
    told, hint = err[-2:]
    assert told.startswith("gpusched: error: ")
    assert re.search(message, told), told
    assert len(told) < 250
    assert hint.startswith("gpusched: hint: ")


def test_folders_missing_and_foreign_files_are_refused(typed, tmp_path, monkeypatch):
    (tmp_path / "traces").mkdir()
    assert "traces is a folder, not a trace" in typed("traces", None)[2][0]
    assert "there is no trace nowhere.csv" in typed("nowhere.csv", None)[2][0]
    (tmp_path / "loop.csv").symlink_to("loop.csv")
    assert "loop.csv cannot be read: too many levels of symbolic links" in typed("loop.csv", None)[2][0]
    if os.geteuid():
        (tmp_path / "theirs.csv").write_text(HEAD)
        (tmp_path / "theirs.csv").chmod(0)
        assert "theirs.csv cannot be read: permission denied" in typed("theirs.csv", None)[2][0]


def test_omitted_jobs_are_counted_and_named_and_the_rest_replayed(typed):
    rows = ["late,-5,5,1", "back,0,-5,1", "none,0,0,1", "no_gpu,0,5,0", "wide,0,5,9", "first,50,5,1", "second,10,5,8"]
    code, out, err = typed("a.csv", HEAD + "\n".join(rows) + "\n", "--nodes", "2x4", "--json")
    assert code == 0
    made = json.loads(out)
    assert {why: one["first"] for why, one in made["dropped"].items()} == {
        "submitted before the trace begins": ["late"],
        "ended before it began": ["back"],
        "did not run": ["none"],
        "requests no GPU": ["no_gpu"],
        "requests more than the 8 GPUs of the cluster": ["wide"],
    }
    assert made["policies"][0]["jobs"] == 2
    assert made["notes"] == ["1 job submitted before the one above; each arrives at its own time"]
    code, out, err = typed("a.csv", None, "--nodes", "2x4")
    assert code == 0
    assert "gpusched: left out, requests more than the 8 GPUs of the cluster: 1 (wide)" in err


def test_ignored_columns_are_named(typed):
    head = "job_id,submit_s,duration_s,num_gpus,mem_gib,colour\n"
    code, out, err = typed("a.csv", head + "a,0,5,1,16,red\n", "--nodes", "2x4", "--json")
    assert code == 0
    assert json.loads(out)["notes"] == ["ignored columns: mem_gib, colour"]
    code, _, err = typed("a.csv", None, "--nodes", "2x4")
    assert err == ["gpusched: ignored columns: mem_gib, colour"]


@pytest.mark.parametrize(
    ("name", "hint"), [("gpu", "did you mean gpus?"), ("colour", "a node has name, cpus, mem_mib, gpus, model")]
)
def test_an_unknown_node_key_is_refused(typed, tmp_path, name, hint):
    (tmp_path / "nodes.json").write_text(json.dumps([{"name": "n1", "cpus": 8, "mem_mib": 1024, name: 4}]))
    code, _, err = typed("a.csv", HEAD + "a,0,5,1\n", "--cluster", "nodes.json")
    assert code == 1
    assert err == [
        f"gpusched: error: nodes.json: {name!r} is not a field of a node",
        f"gpusched: hint: {hint}",
    ]


def test_jobs_too_large_for_every_node_are_counted_and_named(typed):
    text = (
        "name,cpu_milli,memory_mib,num_gpu,gpu_milli\nfits,4000,100,1,1000\ncores,900000,100,1,1000\nhalf,1000,1,1,0\n"
    )
    code, _, err = typed("pods.csv", text, "--nodes", "2x4:64")
    assert code == 0
    assert any("left out, does not fit, asked for 900 CPUs" in line and "1 (cores)" in line for line in err)
    assert "gpusched: left out, requests nothing of a GPU: 1 (half)" in err


def test_repeated_reasons_are_merged_with_the_first_as_an_example(typed):
    rows = "".join(f"p{n},1000,100,1,{100 + n}\n" for n in range(9))
    text = "name,cpu_milli,memory_mib,num_gpu,gpu_milli\nfits,4000,100,1,1000\n" + rows
    code, _, err = typed("pods.csv", text, "--nodes", "2x4")
    assert code == 0
    (line,) = err
    assert line.startswith("gpusched: left out, does not fit, the first of 9 reasons: asked for 0.1 of a GPU")
    assert line.endswith(": 9 (p0, p1, p2, p3, p4 and 4 more)")


def test_a_gang_too_large_for_the_nodes_is_omitted(typed, tmp_path):
    nodes = [{"name": name, "cpus": 8, "mem_mib": 9, "gpus": gpus} for name, gpus in (("a", 8), ("b", 1), ("c", 1))]
    (tmp_path / "n.json").write_text(json.dumps(nodes))
    code, _, err = typed("a.csv", HEAD + "wide,0,5,10\nnine,0,5,9\n", "--cluster", "n.json")
    assert code == 0
    assert err == ["gpusched: left out, does not fit, asked for 10 GPUs of nodes that give them together: 1 (wide)"]


def test_duplicate_ids_are_reported_and_each_line_is_a_job(typed):
    code, out, _ = typed("a.csv", HEAD + "a,0,5,1\na,1,5,1\nb,2,5,1\na,3,5,1\n", "--nodes", "1x4", "--json")
    assert code == 0
    made = json.loads(out)
    assert made["policies"][0]["jobs"] == 4
    assert made["notes"] == ["2 jobs with a duplicate id; each line is a separate job"]


def test_a_table_saved_by_excel_is_read(typed):
    code, out, _ = typed("a.csv", ("\ufeff" + HEAD + "a,0,5,1\n").replace("\n", "\r\n"), "--nodes", "1x4", "--json")
    assert code == 0
    assert json.loads(out)["policies"][0]["jobs"] == 1


CLUSTERS = {
    "no list": ("n.json", "{", "n.json is not a list of nodes"),
    "a number": ("n.json", "7", "n.json is not a list of nodes"),
    "of numbers": ("n.json", "[7]", "n.json is not a list of nodes"),
    "no node": ("n.json", "[]", "n.json lists no nodes"),
    "NaN": (
        "n.json",
        '[{"name": "a", "cpus": NaN, "mem_mib": 1}]',
        "n.json is not a list of nodes: node a has nan CPUs",
    ),
    "negative": (
        "n.json",
        '[{"name": "a", "cpus": 1, "mem_mib": 1, "gpus": -2}]',
        "node a has 1 CPU, 1M, -2 GPUs",
    ),
    "twice": (
        "n.json",
        '[{"name": "a", "cpus": 1, "mem_mib": 1}, {"name": "a", "cpus": 1, "mem_mib": 1}]',
        "n.json lists node 'a' more than once",
    ),
    "without a name": ("n.json", '[{"name": "", "cpus": 1, "mem_mib": 1}]', "a node has no name"),
    "a table without columns": ("n.csv", "a,b\n1,2\n", "n.csv has no column"),
    "a negative table": ("n.csv", "sn,cpu_milli,memory_mib,gpu,model\nx,-1,1,1,A\n", "node x has -0.001 CPUs"),
}


@pytest.mark.parametrize(("name", "body", "message"), CLUSTERS.values(), ids=CLUSTERS)
def test_an_invalid_file_of_nodes_is_refused(typed, tmp_path, name, body, message):
    (tmp_path / name).write_text(body)
    code, _, err = typed("a.csv", HEAD + "a,0,5,1\n", "--cluster", name)
    assert code == 1
    assert message in err[-2]


@pytest.mark.parametrize("shape", ["999999999x8", "1x8x" + "A" * 500, "9" * 5000 + "p"])
def test_an_absurdly_large_cluster_is_refused(typed, shape):
    code, _, err = typed("a.csv", HEAD + "a,0,5,1\n", "--nodes", shape)
    assert code == 2
    assert len(err[-2]) < 200


@pytest.mark.parametrize("seed", range(60))
def test_any_damage_to_a_trace_yields_a_sentence(tmp_path, seed):
    chance = random.Random(seed)
    whole = gzip.decompress((EXAMPLES / "tiresias_60jobs.csv.gz").read_bytes())
    text = bytearray(whole if seed % 2 else "".join(SWF_LINE.format(n, n, 5, 2) for n in range(40)).encode())
    for _ in range(chance.randint(1, 6)):
        at = chance.randrange(len(text))
        text[at : at + chance.randint(0, 5)] = chance.choice(
            [b"-", b"\xff", b",", b"\n", b"|", b";", b'"', b"1e999", b"nan", b"\0", b"", b"9" * 30, b" ", b"\r"]
        )
    path = tmp_path / ("a.csv" if seed % 2 else "a.swf")
    path.write_bytes(bytes(text))
    told, jobs = str(path), []
    try:
        jobs = read_trace(path).jobs
    except UserError as error:
        told = error.message
    assert told.startswith(str(path))
    assert "\n" not in told
    assert all(job.submit_s >= 0 and job.run_s > 0 for job in jobs)
