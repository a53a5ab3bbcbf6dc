"""sprio, sshare and sdiag: the parts of priorities, shares, and counters, as Slurm's commands print them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from golden_cases import case, cases, check
from hypothesis import given
from hypothesis import strategies as st
from slurm_lab import CONFIG, SlurmLab

from gpusched.addons.slurm import sprio, sshare
from gpusched.addons.slurm.command import CommandError, parse
from gpusched.addons.slurm.sdiag import read_metrics

WEIGHTS = """
[priority]
order = "multifactor"
weight_age = 1000
weight_fairshare = 10000
weight_size = 100
weight_queue = 1000
weight_qos = 5000
weight_short = 0
weight_whole = 0
"""


@pytest.fixture(scope="module")
def weighted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmLab]:
    """A queue in the order of the golden machine's weights."""
    found = SlurmLab(tmp_path_factory.mktemp("weighted") / "lab", config=CONFIG + WEIGHTS)
    try:
        found.ok("gsub --hold -t 1h -c 4 -J first --wrap true")
        found.ok("gsub --hold -t 1h --nice 10 -J second --wrap true")
        found.ok("gsub --hold -t 10m -q debug -J third --wrap true")
        yield found
    finally:
        found.close()


def table(text: str) -> list[dict[str, str]]:
    head, *rows = text.splitlines()
    return [dict(zip(head.split(), row.split(), strict=True)) for row in rows]


def test_sprio_has_slurms_columns_and_weights(weighted: SlurmLab) -> None:
    check(weighted, case("sprio", 187), {})
    for number in (185, 186):
        one = case("sprio", number)
        assert weighted.ok(one.command).splitlines()[0] == one.out.splitlines()[0]
        assert {len(line) for line in weighted.ok(one.command).splitlines()[1:]} == {
            len(line) for line in one.out.splitlines()[1:]
        }


def test_the_parts_sum_up_to_the_priority(weighted: SlurmLab) -> None:
    form = "%i %Y %S %A %F %J %P %Q %N"
    rows = [list(map(int, line.split())) for line in weighted.ok(f"sprio -h -o '{form}'").splitlines()]
    assert [row[0] for row in rows] == sorted(row[0] for row in rows)
    for _, priority, *parts, nice in rows:
        assert abs(priority - (sum(parts) - nice)) <= 1
    assert {row[0]: row[-1] for row in rows} == {1: 0, 2: 10, 3: 0}
    size = {row[0]: row[5] for row in rows}
    assert size[1] == 50, "half of the cores of the only node"


def test_a_job_keeps_the_priority_with_which_it_was_started(tmp_path: Path) -> None:
    lab = SlurmLab(tmp_path / "lab", config=CONFIG + WEIGHTS)
    try:
        first, second = (lab.submit(f"-c 8 -t 5 --nice={nice} --wrap 'sleep 600'") for nice in (0, 7))
        lab.wait_state(first, "RUNNING")
        waiting = {name: int(lab.ok(f"squeue -h -j {name} -o %Q")) for name in (first, second)}
        assert waiting[first] - waiting[second] in (6, 7, 8), "one of a running job, one of a waiting one"
        lab.ok(f"scancel {first}")
        lab.wait_state(second, "RUNNING")
        running = lab.ok(f"squeue -h -j {second} -o '%Q %p'")
        number, fraction = running.split()
        assert abs(int(number) - waiting[second]) <= 1
        assert float(fraction) == pytest.approx(int(number) / 2**32, rel=1e-3)
        assert f"Priority={number} " in lab.ok(f"scontrol show job {second}")
        lab.ok("gpusched daemon stop && gq")
        assert lab.ok(f"squeue -h -j {second} -o '%Q %p'") == running
        lab.ok(f"scancel {second}")
        lab.wait(second)
        assert lab.ok(f"sacct -n -X -j {second} -o priority").split() == [number]
        never = lab.submit("--hold --wrap true")
        lab.ok(f"scancel {never}")
        assert lab.ok(f"squeue -h -t all -j {never} -o %Q") == "0\n"
    finally:
        lab.close()


def test_sprio_chooses_jobs(weighted: SlurmLab) -> None:
    def ids(words: str) -> str:
        return " ".join(weighted.ok(f"sprio -h -o %i {words}").split())

    assert ids("-j 1,3") == "1 3"
    assert ids("-p debug") == "3"
    assert ids("-S -i") == "3 2 1"
    assert ids("-u $(id -un)") == ids("-u $(id -u)") == "1 2 3"
    nothing = "Unable to find jobs matching user/id(s) specified\n"
    assert weighted.ok("sprio -j 99999") == weighted.ok("sprio -p nosuch") == nothing


def test_normal_parts_are_from_0_to_1(weighted: SlurmLab) -> None:
    for line in weighted.ok("sprio -h -n -o '%a %f %j %p %q %b'").splitlines():
        assert all(0 <= float(word) <= 1 for word in line.split())


@pytest.mark.parametrize("words", ["-j abc", "-u nosuch", "-S x", "-o '%-3i'", "--nosuch", "stray", "-M elsewhere"])
def test_mistakes_in_sprio_fail_with_a_line(weighted: SlurmLab, words: str) -> None:
    done = weighted.type(f"sprio {words}")
    assert (done.code, done.out) == (1, "")
    assert done.err.startswith("sprio: ")


def test_sprio_says_when_another_order_counts(lab: SlurmLab) -> None:
    done = lab.type("sprio")
    assert done.code == 0
    assert done.err == (
        "sprio: the queue is ordered by response_ratio, not by the sum of these factors; see: gq --priority\n"
    )


# --- sshare ---------------------------------------------------------------------------------------


def test_sshare_has_slurms_columns(weighted: SlurmLab) -> None:
    for one in cases("sshare", 188, 189):
        ours, golden = weighted.ok(one.command).splitlines(), one.out.splitlines()
        assert ours[:2] == golden[:2]
        assert {len(line) for line in ours} == {len(line) for line in golden}


def test_sshare_shows_the_tree_with_shares_and_usage(weighted: SlurmLab) -> None:
    rows = [line.split("|") for line in weighted.ok("sshare -nPa").splitlines()]
    me = weighted.ok("id -un").strip()
    assert [row[:4] for row in rows] == [
        ["root", "", "", "0.000000"],
        [" chem", "", "1", "0.500000"],
        ["  chem", "bob", "1", "1.000000"],
        [" physics", "", "1", "0.500000"],
        ["  physics", me, "1", "1.000000"],
    ]
    assert rows[2][6] == "1.000000", "bob has used nothing"
    assert all(row[6] == "" for row in rows if row[1] == "")


def test_sshare_shows_the_caller_unless_told_otherwise(weighted: SlurmLab) -> None:
    def accounts(words: str) -> list[str]:
        return [line.split("|")[0].strip() for line in weighted.ok(f"sshare -nP {words}").splitlines()]

    assert accounts("") == ["root", "physics", "physics"]
    assert accounts("-U") == ["physics"]
    assert accounts("-u bob") == ["root", "chem", "chem"]
    assert accounts("-a -A chem") == ["chem", "chem"]
    assert weighted.ok("sshare -pn -U").endswith("|\n")


def test_snakemake_finds_its_account(weighted: SlurmLab) -> None:
    assert weighted.ok("sshare -U --format Account%256 --noheader").split() == ["physics"]


def test_mistakes_in_sshare_fail_with_a_line(weighted: SlurmLab) -> None:
    assert weighted.type("sshare -o nosuch").err == 'sshare: error: Invalid field requested: "nosuch"\n'
    for words in ("-o account%x", "-o ,", "--nosuch", "stray"):
        done = weighted.type(f"sshare {words}")
        assert (done.code, done.out) == (1, "")
        assert done.err.startswith("sshare: ")


def test_every_column_that_helpformat_names_works(weighted: SlurmLab) -> None:
    names = weighted.ok("sshare -e").split()
    head = weighted.ok(f"sshare -P -o {','.join(names)}").splitlines()[0]
    assert head.split("|") == names


# --- sdiag ----------------------------------------------------------------------------------------


def test_sdiag_counts_what_happened(own_lab: SlurmLab) -> None:
    lab = own_lab
    done = lab.ok("gsub --parsable -t 1m --wrap true").strip()
    failed = lab.ok("gsub --parsable -t 1m --wrap 'exit 1'").strip()
    held = lab.ok("gsub --parsable --hold -t 1m --wrap true").strip()
    lab.wait(done, failed)
    text = lab.ok("sdiag")
    found = dict(re.findall(r"(?m)^\t?([\w ]+): +(\d+)$", text))
    assert {key: found[f"Jobs {key}"] for key in ("submitted", "started", "completed", "failed", "canceled")} == {
        "submitted": "3",
        "started": "2",
        "completed": "1",
        "failed": "1",
        "canceled": "0",
    }
    assert (found["Jobs pending"], found["Jobs running"]) == ("1", "0")
    assert int(found["Total cycles"]) > 0
    assert int(found["Mean cycle"]) > 0
    lab.ok(f"gcancel {held}")
    assert json.loads(lab.ok("sdiag --json"))["statistics"]["jobs_canceled"] == 1
    golden = case("sdiag", 190).out
    for line in text.splitlines():
        label = re.split(r" at |  +(?=[A-Z])|: ", line)[0]
        assert label in golden, "a line that Slurm does not have"


def test_sdiag_refuses_to_reset(lab: SlurmLab) -> None:
    assert lab.type("sdiag -r").code == 1
    assert lab.type("sdiag --nosuch").code == 1


# --- any words ------------------------------------------------------------------------------------


@given(st.text("%.0123456789-abcdefijNopqrStTuyYABFJPQ |", max_size=20))
def test_any_format_of_sprio_gives_rows_or_an_error(form: str) -> None:
    job = {"id": "4_7", "queue": "main", "user": "ann", "account": None, "priority": 12.5, "parts": {"age": 12.5}}
    try:
        pieces = sprio.percent_pieces(form, sprio.LETTERS)
    except ValueError:
        assert "-" in form
        return
    for row in (sprio.PriorityRow(job, {"age": 100.0}), sprio.PriorityRow(None, {"age": 100.0})):
        assert sprio.render(pieces, [row], header=False).endswith("\n")


@given(st.lists(st.sampled_from(["account", "USER%3", "raw", "level%-9", "x", "%", "norm%0", ""]), max_size=5))
def test_any_columns_of_sshare_are_found_or_refused(words: list[str]) -> None:
    options = parse(sshare.COMMAND, ["-o", ",".join(words)])
    is_wrong = any(word in ("x", "%") for word in words)
    if is_wrong:
        with pytest.raises(CommandError):
            sshare._columns(options)
    elif any(words):
        assert len(sshare._columns(options)) == sum(map(bool, words))


def test_metrics_are_read_by_name_and_labels() -> None:
    text = '# HELP a x\na_total 3\nb{state="FAILED"} 2.5\nb{state="A B"} 1\nbroken\nc NaNx\n'
    assert read_metrics(text) == {"a_total": {"": 3.0}, "b": {'state="FAILED"': 2.5, 'state="A B"': 1.0}}
