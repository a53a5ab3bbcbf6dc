"""sinfo as people and tools type it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from golden_cases import GoldenCase, Places, case, cases, check, check_table
from hypothesis import given
from hypothesis import strategies as st
from slurm_lab import SlurmLab, user

from gpusched.addons.slurm import sinfo
from gpusched.addons.slurm.command import CommandError, parse
from gpusched.addons.slurm.nodes import gpu_type, read_cluster
from gpusched.model.units import ranges

DIFFERS = {
    "020-sinfo-l": "no queue of ours shares its cores by force, as partition `over` of the golden machine does",
    "027-sinfo-json": "one line, as all our documents; and the golden file is cut",
}
_IDLE = [one for one in cases("sinfo") if int(one.name[:3]) <= 28]


@pytest.fixture(scope="module")
def idle(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmLab]:
    """A machine on which nothing runs."""
    found = SlurmLab(tmp_path_factory.mktemp("idle") / "lab")
    yield found
    found.close()


@pytest.mark.parametrize("one", _IDLE, ids=str)
def test_agrees_with_slurm_on_an_idle_machine(idle: SlurmLab, one: GoldenCase) -> None:
    free = r"idle +(\d+) *$"
    check(idle, one, DIFFERS, Places(mask=[rf"(?m){free}"], is_blind_to_width="-O" in one.command))


def test_every_difference_is_of_a_case_that_is_compared() -> None:
    check_table("sinfo", DIFFERS, _IDLE)


def test_who_drained_a_node_and_when_survives_a_restart(own_lab: SlurmLab) -> None:
    lab = own_lab
    lab.ok("scontrol update nodename=node1 state=drain reason='fan failure'")
    asked = "sinfo -R; sinfo -h -o '%E|%u|%U|%H'; scontrol show node | grep Reason="
    before = lab.ok(asked)
    assert re.search(rf"fan failure \[{user()}@\d{{4}}-\d\d-\d\dT\d\d:\d\d:\d\d\]", before)
    assert f"fan failure|{user()}|{user()}({os.getuid()})|2" in before
    lab.ok("gpusched daemon stop && gq")
    assert lab.ok(asked) == before
    lab.ok("scontrol update nodename=node1 state=resume")
    lab.ok("gpusched daemon stop && gq")
    assert lab.ok("sinfo -h -R") == ""
    assert lab.type("scontrol show node | grep Reason=").out == ""


def test_agrees_with_slurm_on_a_full_and_a_drained_machine(own_lab: SlurmLab) -> None:
    lab = own_lab
    busy, busy_c, reasons, drained, reserved = (case("sinfo", number) for number in (191, 192, 194, 195, 183))
    job = lab.ok("gsub --parsable -c 8 -t 5m --wrap 'sleep 100'").strip()
    lab.wait_state(job, "RUNNING")
    check(lab, busy, {})
    check(lab, busy_c, {})
    lab.ok("scontrol update nodename=node1 state=drain reason='fan failure'")
    check(lab, drained, {})
    who = lab.ok("id -un").strip()
    found = check(lab, reasons, {}, Places(mask=[r"failure +(\w+) "], is_blind_to_width=True))
    assert found.out.splitlines()[1].split()[2] == who
    assert lab.ok("sinfo -hRl -o '%U %t'").split() == [f"{who}({os.getuid()})", "drng"]
    assert f"   Reason=fan failure [{who}@20" in lab.ok("scontrol show node")
    assert lab.ok("sinfo -h -t drained") != lab.ok("sinfo -h -t draining")
    lab.ok(f"gcancel {job}")
    lab.wait(job)
    assert lab.ok("sinfo -h -p main -o %t").strip() == "drain"
    lab.ok("scontrol update nodename=node1 state=resume")
    lab.ok(
        "scontrol create reservation ReservationName=class StartTime=now+60minutes Duration=60 Users=bob Nodes=node1"
    )
    check(lab, reserved, {})


# --- the lines of clients, with the parsing of each -----------------------------------------------


def test_snakemake_finds_the_default_partition(idle: SlurmLab) -> None:
    names = idle.ok("sinfo -o %P").splitlines()
    assert [name.removesuffix("*") for name in names if name.endswith("*")] == ["main"]


def test_torchx_reads_memory_by_partition(idle: SlurmLab) -> None:
    head, *rows = idle.ok("sinfo --format '%P,%m' --noconvert").splitlines()
    assert head.split(",") == ["PARTITION", "MEMORY"]
    assert dict(row.split(",") for row in rows) == {"main*": "24105", "over": "24105", "debug": "24105"}


def test_open_ondemand_counts_nodes_and_cores(idle: SlurmLab) -> None:
    text = idle.ok("sinfo -aho %F/%C")
    assert [int(word) for word in text.strip().split("/")] == [0, 1, 0, 1, 0, 8, 0, 8]
    host, gres, used, state = (
        word.strip()
        for word in _columns(idle, "sinfo -ahNO nodehost:100,gres:512,gresused:512,statelong", 100, 512, 512)
    )
    assert (host, gres, used, state) == ("node1", "gpu:fake:4", "gpu:fake:0(IDX:N/A)", "idle")
    parts = idle.ok(r"sinfo -ho $'\x1e%c\x1f%n\x1f%f'").split("\x1e")[1:]
    assert [part.strip().split("\x1f") for part in parts] == [["8", "node1", "(null)"]]


def _columns(lab: SlurmLab, line: str, *widths: int) -> list[str]:
    text = lab.ok(line).splitlines()[0]
    found = []
    for width in widths:
        found.append(text[:width])
        text = text[width:]
    return [*found, text]


def test_slurm_gpustat_counts_gpus(idle: SlurmLab) -> None:
    row = idle.ok("sinfo --noheader").splitlines()[0].split()
    assert (row[4], row[5]) == ("idle", "node1")
    nodes, gres = idle.ok("sinfo -o '%1000N|%1000G' --noheader").splitlines()[0].split("|")
    assert nodes.strip() == "node1"
    match = re.match(r"gpu:(\w+):(\d+)", gres.strip())
    assert match is not None
    assert match.groups() == ("fake", "4")
    assert idle.ok("sinfo -V").split()[1] == "22.05.8"


def test_slurm_usage_reads_a_line_for_each_node(idle: SlurmLab) -> None:
    for line, cell in (("sinfo -h -N --format='%N,%c'", "8"), ("sinfo -h -N --format='%N,%G'", "gpu:fake:4")):
        assert {tuple(row.split(",")) for row in idle.ok(line).splitlines()} == {("node1", cell)}


def test_stui_gets_its_quotes_back(idle: SlurmLab) -> None:
    assert idle.ok("""sinfo --format='"%R"' --noheader""").splitlines() == ['"main"', '"over"', '"debug"']


def test_slurm_monitor_reads_seven_words(idle: SlurmLab) -> None:
    head, *rows = idle.ok("sinfo '--format=%P %a %D %T %c %l %m'").splitlines()
    assert head.split() == "PARTITION AVAIL NODES STATE CPUS TIMELIMIT MEMORY".split()
    assert rows[0].split() == ["main*", "up", "1", "idle", "8", "1-00:00:00", "24105"]


def test_json_has_the_nodes(idle: SlurmLab) -> None:
    document = json.loads(idle.ok("sinfo --json"))
    (node,) = document["nodes"]
    assert document["errors"] == []
    assert (node["name"], node["gres"], node["cpus"], node["state"]) == ("node1", "gpu:fake:4", 8, "idle")
    golden = case("sinfo", 27).out.partition('"nodes": [')[2]
    keys = set(re.findall(r'(?m)^      "(\w+)"', golden))
    assert keys - node.keys() <= {
        *("burstbuffer_network_address", "cpu_binding", "extra", "last_busy", "next_state_after_reboot", "port"),
        *("next_state_after_reboot_flags", "slurmd_start_time"),
    }, "these are not known here"


def test_variables_of_the_environment_count_less_than_options(idle: SlurmLab) -> None:
    assert idle.ok("sinfo -h", SINFO_FORMAT="%R").split() == ["main", "over", "debug"]
    assert idle.ok("sinfo -h -o %n", SINFO_FORMAT="%R").split() == ["node1"]
    assert idle.ok("sinfo -h -o %R", SINFO_PARTITION="debug").split() == ["debug"]
    assert idle.ok("sinfo -h -o %R -S R").split() == ["debug", "main", "over"]
    assert idle.ok("sinfo -h -o %R", SINFO_SORT="-R").split() == ["over", "main", "debug"]


@pytest.mark.parametrize(
    "words",
    ["-o '%-8n'", "-O nosuch", "-S '?'", "-i 0", "-i x", "-t ''", "-n 'a[1'", "--nosuch", "stray", "-M elsewhere"],
)
def test_mistakes_fail_with_a_line(idle: SlurmLab, words: str) -> None:
    done = idle.type(f"sinfo {words}")
    assert (done.code, done.out) == (1, "")
    assert done.err.startswith("sinfo: ")


def test_the_local_cluster_and_all_are_accepted(idle: SlurmLab) -> None:
    assert idle.ok("sinfo -h -M all") == idle.ok("sinfo -h")


# --- several nodes, several kinds of cards --------------------------------------------------------


def node(name: str, **values: Any) -> dict[str, Any]:
    found = {
        "name": name,
        "state": "up",
        "cpus": 8.0,
        "cpus_booked": 0.0,
        "mem_mib": 1000,
        "mem_booked_mib": 0,
        "is_busy": False,
        "message": None,
        "drained_by": None,
        "drained_at": None,
        "why_not": None,
        "labels": [],
        "resources": {},
        "mem_available_mib": 900,
        "architecture": "x86_64",
        "system": "Linux",
        "boot_at": None,
        "load_average": 0.5,
    }
    return {**found, **values}


def gpu(name: str, index: int, model: str = "NVIDIA A100-SXM4-80GB", **values: Any) -> dict[str, Any]:
    return {"node": name, "index": index, "name": model, "mig_profile": None, "state": "idle", "jobs": [], **values}


def queue(name: str, **values: Any) -> dict[str, Any]:
    found = {"name": name, "is_leaf": True, "is_default": False, "position": None, "preempt_mode": "requeue"}
    return {**found, "default_time_s": None, "max_time_s": None, "accounts": [], **values}


def cluster(*nodes: dict[str, Any], gpus: list[dict[str, Any]] | None = None, **more: Any) -> dict[str, Any]:
    return {
        "nodes": list(nodes),
        "gpus": gpus or [],
        "queues": [queue("main", is_default=True)],
        "reservations": [],
        "cluster_name": "lab",
        **more,
    }


class FakeClient:
    def __init__(self, answer: dict[str, Any]) -> None:
        self.answer = answer

    def call(self, method: str, path: str) -> dict[str, Any]:
        assert (method, path) == ("GET", "/v1/cluster")
        return self.answer


def text(answer: dict[str, Any], *words: str) -> str:
    options = parse(sinfo.COMMAND, words)
    return sinfo._text(FakeClient(answer), options, sinfo._states(options))  # type: ignore[arg-type]


LAB = cluster(
    node("gpu01", is_busy=True, cpus_booked=2.5),
    node("gpu02", is_busy=True, cpus_booked=8.0),
    node("gpu03"),
    node("gpu04", state="drained", message="fan", is_busy=True, cpus_booked=1.0),
    node("gpu05", state="drained", message="fan"),
    node("big", cpus=64.0, mem_mib=9000, labels=["nvlink", "fast"]),
    gpus=[
        *(gpu("gpu01", index, jobs=["7"] if index in (0, 1, 3) else []) for index in range(4)),
        *(gpu("gpu03", index) for index in range(4)),
        *(gpu("big", index, "Tesla T4") for index in range(2)),
        gpu("big", 1021, mig_profile="1g.10gb"),
    ],
)


def test_nodes_in_the_same_state_share_a_row() -> None:
    assert text(LAB) == (
        "PARTITION AVAIL  TIMELIMIT  NODES  STATE NODELIST\n"
        "main*        up   infinite      1    mix gpu01\n"
        "main*        up   infinite      1  alloc gpu02\n"
        "main*        up   infinite      2   idle gpu03,big\n"
        "main*        up   infinite      1   drng gpu04\n"
        "main*        up   infinite      1  drain gpu05\n"
    )
    assert text(LAB, "-h", "-t", "drain,alloc", "-o", "%t %D %N").split("\n")[:-1] == [
        *("alloc 1 gpu02", "drng 1 gpu04", "drain 1 gpu05")
    ]
    assert text(LAB, "-hR") == f"{'fan':20} {'Unknown':9} {'Unknown':19} gpu04-05\n".replace("04-05", "[04-05]")


def test_counts_are_of_all_nodes_of_a_row() -> None:
    found = text(LAB, "-ho", "%C").strip()
    allocated, idle_cpus, other, total = map(int, found.split("/"))
    assert (allocated, total) == (3 + 8 + 1, 5 * 8 + 64)
    assert (idle_cpus, other) == (5 + 8 + 64, 7 + 8)
    assert text(LAB, "-ho", "%F") == "3/2/1/6\n"


def test_numbers_that_differ_have_a_plus_and_exact_parts_them() -> None:
    assert text(LAB, "-h", "-t", "idle", "-o", "%D %c %m") == "2 8+ 1000+\n"
    assert text(LAB, "-he", "-t", "idle", "-o", "%D %c %m") == "1 8 1000\n1 64 9000\n"


def test_the_cluster_and_the_way_of_preemption_are_those_of_the_settings() -> None:
    assert text(cluster(node("n1"), queues=[queue("q", preempt_mode="off")]), "-ho", "%V %M") == "lab OFF\n"


def test_gres_has_a_word_for_each_kind_of_card() -> None:
    by_name = dict(line.split("|") for line in text(LAB, "-hN", "-o", "%N|%G").splitlines())
    assert by_name["gpu01"] == "gpu:a100-sxm4-80gb:4"
    assert by_name["big"] == "gpu:tesla_t4:2,gpu:1g.10gb:1"
    assert by_name["gpu02"] == "(null)"
    used = dict(line.split("|") for line in text(LAB, "-hN", "-O", "nodehost:|,gresused:60").splitlines())
    assert used["gpu01"].strip() == "gpu:a100-sxm4-80gb:3(IDX:0-1,3)"


def test_partitions_come_in_the_order_of_the_file_and_parents_not_at_all() -> None:
    queues = [
        queue("b", position=2, is_default=True, max_time_s=60),
        queue("a", position=3),
        queue("top", position=0, is_leaf=False),
        queue("z"),
    ]
    found = cluster(node("n1"), queues=queues)
    assert text(found, "-ho", "%P %l") == "b* 1:00\na infinite\nz infinite\n"
    assert text(found, "-ho", "%N %t") == "n1 idle\n", "without partitions, a node has one row"
    assert text(found, "-hNo", "%N") == "n1\n" * 3, "with --Node, one for each of its partitions"


def test_a_partition_without_such_nodes_has_a_row_of_none() -> None:
    assert text(cluster(node("n1")), "-h", "-t", "down") == "main*        up   infinite      0    n/a \n"
    assert text(cluster(node("n1")), "-h", "-t", "down", "-o", "%n") == ""


def test_maintenance_and_reservations_are_states() -> None:
    held = {"name": "r", "is_active": True, "held": [{"node": "n1", "is_node": True}]}
    for is_maintenance, state in ((True, "maint"), (False, "resv")):
        found = cluster(node("n1"), reservations=[{**held, "is_maintenance": is_maintenance}])
        assert text(found, "-ho", "%t %i") == f"{state} r\n"


def test_the_type_of_a_card_is_a_word_that_gres_takes() -> None:
    for model, word in (
        ("NVIDIA GeForce RTX 3090", "geforce_rtx_3090"),
        ("NVIDIA A100-SXM4-80GB", "a100-sxm4-80gb"),
        ("Quadro RTX 6000/8000", "quadro_rtx_6000_8000"),
        ("A,B:C (x)", "a_b_c__x_"),
    ):
        assert gpu_type(gpu("n", 0, model)) == word


@given(st.sets(st.integers(0, 40)))
def test_ranges_name_each_index_once(indices: set[int]) -> None:
    found: list[int] = []
    for word in filter(None, ranges(indices).split(",")):
        low, _, high = word.partition("-")
        found += range(int(low), int(high or low) + 1)
    assert found == sorted(indices)


_FORMS = st.lists(
    st.sampled_from([f"%{letter}" for letter in sinfo.LETTERS])
    | st.sampled_from(["%.9", "%12", "x", "%", "|", " "])
    | st.text(max_size=3),
    max_size=8,
).map("".join)


@given(_FORMS, st.sampled_from(["", "N", "e", "s", "l", "R", "h"]), st.sampled_from(["", "-t,N", "P", "#P,-c"]))
def test_any_format_gives_rows_or_an_error(form: str, flag: str, order: str) -> None:
    words = [*([f"-{flag}"] if flag else []), *(["-S", order] if order else []), f"--format={form}"]
    if "%-" in re.sub(r"%\.?\d*[a-zA-Z]", "", form) or re.search(r"%\.?\d*-", form):
        with pytest.raises(CommandError, match="Invalid node format"):
            text(LAB, *words)
        return
    found = text(LAB, *words)
    _, partitions = read_cluster(LAB)
    assert partitions[0].name == "main"
    assert found.endswith("\n")


def test_any_words_get_an_answer_or_lines_of_error(idle: SlurmLab, tmp_path: Path) -> None:
    lines: list[list[str]] = []
    word = st.sampled_from(
        "-N -l -s -R -a -e -h -o %P -O nodelist:9 -p main -t idle -n node1 -S -t,N -T -d -r --json --noconvert -M all "
        "-hNl --states=drain,mix --Node=1 --for --Form".split()
    ) | st.text(max_size=6).filter(lambda found: "\0" not in found and "i" not in found)

    @given(st.lists(word, max_size=5))
    def collect(words: list[str]) -> None:
        lines.append(words)

    collect()
    program = (
        "import json, sys\n"
        "from gpusched.addons.slurm import sinfo\n"
        "from gpusched.addons.slurm.command import run\n"
        "for words in json.load(sys.stdin):\n"
        "    assert run(sinfo.COMMAND, sinfo.body, words) in (0, 1), words\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        input=json.dumps(lines),
        env=idle.env,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "bug in gpusched" not in done.stderr, done.stderr[-2000:]


def test_a_paused_queue_is_a_partition_that_is_down(own_lab: SlurmLab) -> None:
    lab = own_lab
    partition = lab.ok("sinfo -h -o %R").split()[0]
    assert lab.ok(f"scontrol update PartitionName={partition} State=DOWN") == ""
    assert lab.ok(f"sinfo -h -p {partition} -o '%R %a'").split() == [partition, "down"]
    assert "State=DOWN " in lab.ok(f"scontrol show partition {partition}")
    job = lab.submit(f"-p {partition} --wrap true")
    assert lab.ok(f"squeue -h -j {job} -o '%T %r'").split() == ["PENDING", "PartitionDown"]
    assert lab.ok(f"scontrol update PartitionName={partition} State=UP") == ""
    assert lab.ok(f"sinfo -h -p {partition} -o %a").strip() == "up"
    lab.wait_state(job, "COMPLETED")


MISTAKES = [
    ("PartitionName=nope State=DOWN", "slurm_update error: Invalid partition name specified"),
    ("PartitionName=nope State=INACTIVE", "State=INACTIVE is not supported; use State=DOWN or State=UP"),
    ("PartitionName=nope State=UP Nodes=n1", "Update of this parameter is not supported: Nodes=n1"),
    ("PartitionName=nope Nodes=n1", "update of partitionname is not supported; use: gctl queue modify NAME"),
]


@pytest.mark.parametrize(("words", "said"), MISTAKES)
def test_other_states_of_a_partition_are_refused(idle: SlurmLab, words: str, said: str) -> None:
    done = idle.type(f"scontrol update {words}")
    assert done.code == 1
    assert said in done.err
