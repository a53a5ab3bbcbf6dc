"""Words to values by the tables: getopt's ways, what each reader takes, and what the tables themselves must be."""

from __future__ import annotations

import shlex
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpusched.cli.job_options import gsub_table, read_change
from gpusched.cli.options import TABLES, gq_table
from gpusched.cli.parse import parse, split_words
from gpusched.errors import UsageError
from gpusched.model.option import Option

MEM = {"mem_mib": None, "mem_per_cpu_mib": None, "mem_per_gpu_mib": None}
PER_NODE = {"gpus_per_node": 2, "gpu_fraction": None}
GPUS = {"gpus": None, "gpu_fraction": None, "gpu_type": None, "gpu_variants": None}


def read(*words: str) -> dict[str, Any]:
    return parse(gsub_table(), words)[0]


@pytest.mark.parametrize(
    "words",
    [
        ["--time=5", "--hold"],
        ["--time", "5", "--hold"],
        ["-t5", "-H"],
        ["-t", "5", "-H"],
        ["-Ht5"],
        ["-Ht", "5"],
        ["-t=5", "-H"],
        ["--tim", "5", "--hol"],
    ],
)
def test_all_getopt_spellings_are_equivalent(words: list[str]) -> None:
    assert parse(gsub_table(), [*words, "x.sh", "-t", "9"]) == (
        {"time_limit_s": 300, "hold": True},
        ["x.sh", "-t", "9"],
        False,
    )


def test_two_dashes_end_the_options_and_one_is_a_word() -> None:
    assert parse(gsub_table(), ["-H", "--", "ls", "-l", "--", "x"]) == ({"hold": True}, ["ls", "-l", "--", "x"], True)
    assert parse(gsub_table(), ["-", "a"]) == ({}, ["-", "a"], False)
    assert parse(gq_table(), ["1", "--", "-2"], operands_first=True) == ({}, ["1", "-2"], True)


def test_options_follow_operands_only_where_allowed() -> None:
    assert parse(gq_table(), ["42", "--me"], operands_first=True) == ({"me": True}, ["42"], False)
    assert parse(gq_table(), ["42", "--me"]) == ({}, ["42", "--me"], False)


def test_the_last_option_wins_but_lists_and_variables_add_up() -> None:
    assert read("-t", "5", "--time", "7")["time_limit_s"] == 420
    assert read("-E", "A=1", "-E", "B=2", "-E", "A=3=4")["extra_env"] == {"A": "3=4", "B": "2"}
    assert parse(gq_table(), ["-u", "ada,bob", "-u", "eve"])[0]["users"] == ["ada", "bob", "eve"]


@pytest.mark.parametrize(
    ("words", "says", "hint"),
    [
        (["--retrys", "3"], "unknown option '--retrys'", "did you mean --retries?"),
        (
            ["--re"],
            "'--re' is short for --requeue, --res, --reservation, --resubmit, --resume, --retries, --retry-on",
            "gsub --help",
        ),
        (["-Z"], "unknown option '-Z'", "gsub --help"),
        (["-HZ"], "unknown option '-Z'", "gsub --help"),
        (["--time"], "--time needs a value", "gsub --help"),
        (["-Ht"], "-t needs a value", "gsub --help"),
        (["--hold=1"], "--hold takes no value", "gsub --help"),
        (["--\x1b[31m"], "x1b[31m'", "gsub --help"),
    ],
)
def test_unreadable_options_are_quoted_with_the_nearest(words: list[str], says: str, hint: str) -> None:
    with pytest.raises(UsageError) as raised:
        parse(gsub_table(), words)
    assert says in raised.value.message
    assert raised.value.message.isprintable()
    assert hint in raised.value.hint


@pytest.mark.parametrize(
    ("words", "values"),
    [
        ("-g 2", {**GPUS, "gpus": 2}),
        ("-g a100:2", {**GPUS, "gpus": 2, "gpu_type": "a100"}),
        ("-g 1g.10gb", {**GPUS, "gpus": 1, "gpu_type": "1g.10gb"}),
        ("-g 1c.3g.40gb:1", {**GPUS, "gpus": 1, "gpu_type": "1c.3g.40gb"}),
        ("-g a100", {**GPUS, "gpus": 1, "gpu_type": "a100"}),
        ("-g 0.5", {**GPUS, "gpu_fraction": 0.5}),
        ("-g t4:.25", {**GPUS, "gpu_fraction": 0.25, "gpu_type": "t4"}),
        ("-g a100:2 -g 0.5", {**GPUS, "gpu_fraction": 0.5}),
        ("-g 0.5 -g 1", {**GPUS, "gpus": 1}),
        ("--mem 2G", {**MEM, "mem_mib": 2048}),
        ("--mem 0", {**MEM, "mem_mib": "all"}),
        ("--mem 0G", {**MEM, "mem_mib": "all"}),
        ("--mem 2G --mem-per-cpu 10M", {**MEM, "mem_per_cpu_mib": 10}),
        ("--mem-per-cpu 10M --mem-per-gpu 2G", {**MEM, "mem_per_gpu_mib": 2048}),
        ("-n 4 --tasks-per-node 2", {"ntasks": 4, "ntasks_per_node": 2}),
        ("--gpus-per-task a100:1", {"gpus_per_task": 1, "gpu_type": "a100"}),
        ("--ntasks-per-gpu 2 --cpus-per-gpu 4", {"ntasks_per_gpu": 2, "cpus_per_gpu": 4}),
        ("-N 2", {"nodes": 2, "nodes_max": None}),
        ("-N 1-2", {"nodes": 1, "nodes_max": 2}),
        ("-N 2-2", {"nodes": 2, "nodes_max": None}),
        ("--gres gpu:a100:2,scratch:3,ssd", {**PER_NODE, "gpu_type": "a100", "resources": {"scratch": 3, "ssd": 1}}),
        ("--gres none", {}),
        ("-i in.txt --comment two --wckey x", {"stdin": "in.txt", "comment": "two", "wckey": "x"}),
        ("--exclusive", {"exclusive": True}),
        ("--test-only", {"dry_run": True}),
        ("-t 1-2", {"time_limit_s": 93600}),
        ("-t UNLIMITED", {"time_limit_s": "unlimited"}),
        ("-t none", {"time_limit_s": "unlimited"}),
        ("-t 0", {"time_limit_s": "unlimited"}),
        ("--time=auto", {"time_limit_s": "auto"}),
        ("-t AUTO -t 4h", {"time_limit_s": 14400}),
        ("--signal USR1", {"notice": {"signal": 10, "before_s": 60, "main_only": False}}),
        ("--signal B:SIGTERM@30", {"notice": {"signal": 15, "before_s": 30, "main_only": True}}),
        ("--signal 12@0", {"notice": {"signal": 12, "before_s": 0, "main_only": False}}),
        ("--backoff 0", {"backoff_s": 0}),
        ("--grace 2m", {"grace_s": 120}),
        ("--retry-on oom,3,10-20", {"retry_on": ["oom", "3", "10-20"]}),
        ("--no-requeue --requeue", {"requeue": True}),
        ("--gres=mps:50", {"gpus_per_node": 1, "gpu_fraction": 0.5}),
        ("--gres=mps:100", {"gpus_per_node": 1, "gpu_fraction": None}),
        ("--gres=shard:2", {"gpus_per_node": 1, "gpu_fraction": None, "gpu_shards": 2}),
        ("--tres-per-task=cpu:2,gres/gpu:1", {"cpus": 2.0, "cpus_per_gpu": None, "gpus_per_task": 1}),
        ("--mincpus 4", {"min_cpus": 4}),
        ("-p fast", {"queue": "fast"}),
        ("--cpus-per-task 0.5", {"cpus": 0.5}),
        ("-J x", {"name": "x"}),
    ],
)
def test_gsub_reads_its_options(words: str, values: dict[str, Any]) -> None:
    assert read(*words.split()) == values


@pytest.mark.parametrize(
    "words",
    [
        *(
            "-g -1",
            "-g 1.5",
            "-g 0.0",
            "-g 2000",
            "-g a:b:1e2",
            "--gres=mps:101",
            "--gres=shard:x",
            "--tres-per-task=mem:1G",
            "--tres-per-task=gres/fpga:1",
            "--gpus-per-socket=0",
            "--sockets-per-node=x",
            "--gres=gpu:x:y:z",
            "--gres=:1",
            "--gres=a:b:1",
            "-N 3-2",
            "-N 0-2",
            "-N 1-x",
            "--gpus-per-task 0",
            "--gpus-per-task 0.5",
            "--exclusive=me",
            "--gres=gpu:x:-1",
        ),
        *(
            "--mem 0X",
            "--mem -1",
            "--mem 1X",
            "--mem inf",
            "-c -1",
            "-c inf",
            "-c 1_0",
            "-c 9e99",
            "-t -1",
            "-t 99999d",
        ),
        *("--nice 1.0", "--nice 10001", "--nice --hold", "--nice " + "9" * 400, "--retries -1", "-n 1-2"),
        *("--signal TERM@-1", "--signal 65", "--signal 0", "--signal SIG", "--signal B:", "--signal SIG_DFL"),
        *("--backoff soon", "--backoff-factor 0.5", "--grace -1", "--open-mode a", "--gpu-ids both", "-E =x"),
        *("--begin never", "--begin now+", "--begin now-1eon", "--completion tcsh"),
    ],
)
def test_an_invalid_gsub_option_is_a_usage_error(words: str) -> None:
    with pytest.raises(UsageError, match="^--"):
        read(*words.split())


def test_all_mistakes_are_reported_at_once_up_to_an_unknown_option() -> None:
    with pytest.raises(UsageError) as raised:
        parse(gsub_table(), ["-t", "soon", "--hold=1", "--mem=lots", "-c", "2", "--colour", "red", "--nice", "x"])
    said = [one.message.partition(":")[0] for one in raised.value.mistakes]
    assert said == ["--time", "--hold takes no value", "--mem", "unknown option '--colour'"]
    with pytest.raises(UsageError) as raised:
        parse(gsub_table(), ["-t", "soon", "--", "--mem=lots"])
    assert raised.value.mistakes == ()


@given(st.sampled_from([option for option in gsub_table().options if option.metavar]), st.text())
def test_any_text_raises_at_most_a_usage_error(option: Option, text: str) -> None:
    said = ""
    try:
        parse(gsub_table(), [f"{option.long}={text}"])
    except UsageError as error:
        said = error.message
    assert said.isprintable()


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--time=5 -J x", ["--time=5", "-J", "x"]),
        ("\t--time=5   \t-J\tx ", ["--time=5", "-J", "x"]),
        ("--nodes=1      # number of nodes", ["--nodes=1"]),
        ("--job-name=a#b", ["--job-name=a#b"]),
        ("--comment='two words'", ["--comment=two words"]),
        ('-J "a \\"b\\" \\$ #"', ["-J", 'a "b" \\$ #']),
        ("-J 'it is '\\''so'\\'''", ["-J", "it is 'so'"]),
        ("-J '' x", ["-J", "", "x"]),
        ("-J a\\ b", ["-J", "a b"]),
        ("--no-requeue \r", ["--no-requeue"]),
        ("", []),
    ],
)
def test_directive_lines_split_as_a_shell_splits(line: str, words: list[str]) -> None:
    assert split_words(line) == words


@given(st.lists(st.text(st.characters(exclude_characters="\r", exclude_categories=["Cs"]))))
def test_quoted_text_round_trips(words: list[str]) -> None:
    assert split_words(shlex.join(words)) == words


@pytest.mark.parametrize("line", ["-J 'x", '-J "x', '-J "x\\"'])
def test_an_open_quote_is_an_error(line: str) -> None:
    with pytest.raises(ValueError, match="not closed"):
        split_words(line)


@pytest.mark.parametrize("command", sorted(TABLES))
def test_a_table_names_each_option_once_and_explains_it(command: str) -> None:
    table = TABLES[command]()
    names = [name for option in table.options for name in option.names]
    assert len(names) == len(set(names))
    assert {"--help", "-h", "--version", "--completion"} <= set(names)
    for option in table.options:
        # A flag that has a reader may be given a value, too: --snapshot, --snapshot=copy.
        assert option.read is not None or not option.metavar, option.names
        assert bool(option.sets) != bool(option.metavar), option.names
        assert option.help or option.names == ("--no-requeue",)


def test_updates_keep_the_kind_of_card_but_not_a_fraction() -> None:
    assert read_change("gpus", "2") == {"gpus": 2, "gpu_fraction": None}
    assert read_change("gpus", "a100:2") == {"gpus": 2, "gpu_fraction": None, "gpu_type": "a100"}
    assert read_change("gpus", "0.5") == {"gpus": 1, "gpu_fraction": 0.5}
