"""Every option of sbatch: implemented by gsub, accepted with a note, or refused by name."""

from __future__ import annotations

import pytest

from gpusched.cli.job_options import gsub_table
from gpusched.cli.parse import parse
from gpusched.cli.slurm_options import NOTES, ONLY_SLURM, OnlySlurm, rows
from gpusched.errors import UsageError

LONG = """
    account array batch bb bbf begin chdir cluster-constraint clusters comment constraint container contiguous core-spec
    cores-per-socket cpu-bind cpu-freq cpus-per-gpu cpus-per-task deadline delay-boot dependency distribution error
    exclude exclusive export export-file extra-node-info get-user-env gid gpu-bind gpu-freq gpus gpus-per-node
    gpus-per-socket gpus-per-task gres gres-flags hint hold ignore-pbs input job-name kill-on-invalid-dep licenses
    mail-type mail-user mcs-label mem mem-bind mem-per-cpu mem-per-gpu mincpus network nice no-kill no-requeue nodefile
    nodelist nodes ntasks ntasks-per-core ntasks-per-gpu ntasks-per-node ntasks-per-socket open-mode output overcommit
    oversubscribe parsable partition power prefer priority profile propagate qos quiet reboot requeue reservation signal
    sockets-per-node spread-job switches tasks-per-node test-only thread-spec threads-per-core time time-min tmp uid
    use-min-nodes verbose wait wait-all-nodes wckey wrap
""".split()
"""Long options of sbatch 22.05."""
ANOTHER_MEANING = {"batch"}
"""Of gsub: a file of jobs; only at the prompt, so that a script's is refused."""


@pytest.mark.parametrize("name", LONG)
def test_gsub_knows_every_option_of_sbatch(name: str) -> None:
    try:
        gsub_table().find(f"--{name}")
    except UsageError as error:
        pytest.fail(error.message)


@pytest.mark.parametrize(
    "one", [one for name, one in ONLY_SLURM.items() if name not in ANOTHER_MEANING], ids=lambda one: one.option.long
)
def test_an_option_without_a_counterpart_is_noted_or_refused_with_a_reason(one: OnlySlurm) -> None:
    shapes = [[one.option.long]]
    if one.option.metavar:
        shapes = [
            [f"{one.option.long}=x"],
            [one.option.long] if one.option.metavar.startswith("[") else [one.option.long, "x"],
        ]
    for words in shapes:
        if one.is_refused:
            with pytest.raises(UsageError) as raised:
                parse(gsub_table(), [*words, "script.sh"])
            assert raised.value.message == f"{one.option.long}: it is not supported: {one.why}"
        else:
            values, operands, _ = parse(gsub_table(), [*words, "script.sh"])
            assert (values, operands) == ({NOTES: [one.note]}, ["script.sh"])
    assert one.why[0].islower() or one.why.startswith("#")
    assert not one.why.endswith(".")


def test_short_spellings_of_sbatch_mean_the_same() -> None:
    values = parse(gsub_table(), ["-b", "2030-01-01T00:00:00", "-Q", "-M", "lab", "-k", "-n", "2"])[0]
    assert values["begin_at"] == parse(gsub_table(), ["--begin", "2030-01-01T00:00:00"])[0]["begin_at"]
    assert (values["quiet"], values["ntasks"]) == (True, 2)
    assert [text.partition(" ")[0] for text in values[NOTES]] == ["--clusters", "--no-kill"]


def test_notes_of_several_options_add_up() -> None:
    values = parse(gsub_table(), ["--hint=x", "--contiguous", "--tmp", "1G", "--exclusive=user", "-t", "5"])[0]
    assert [text.split(maxsplit=1)[0] for text in values.pop(NOTES)] == [
        "--hint",
        "--contiguous",
        "--tmp",
        "--exclusive=user:",
    ]
    assert values == {"exclusive": True, "time_limit_s": 300}


def test_none_of_them_is_an_option_of_gsub_in_its_own_right() -> None:
    table = gsub_table()
    own = {name for option in table.options for name in option.names}
    assert own.isdisjoint(f"--{name}" for name in ONLY_SLURM.keys() - ANOTHER_MEANING)
    # Abbreviations and hints are for gsub's own options.
    assert table.find("--expo").long == "--export"
    assert table.find("--mem-b").names == ("--mem-bind",)


def test_rows_are_those_of_a_command_of_slurm() -> None:
    found = rows(without=("hint",)).splitlines()
    assert len(found) == len(ONLY_SLURM) - 1
    assert "-k --no-kill [ARG]  --no-kill has no effect: a job ends when one of its nodes fails" in found
