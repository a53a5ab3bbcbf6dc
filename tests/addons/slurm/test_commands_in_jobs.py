"""Slurm's commands in the PATH of every job, however it was submitted."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from slurm_lab import SlurmLab

from gpusched.slurm_commands import (
    COMMANDS,
    available_commands,
    executable_text,
    import_folders,
    is_login_bash,
    unreachable_part,
)


def path_of_a_job(lab: SlurmLab, name: str, words: str = "", **env: str) -> list[str]:
    """PATH as a job has it, folder by folder."""
    line = f"gsub --parsable -t 5m {words} --wrap '/usr/bin/printenv PATH > {name}.draft; /bin/mv {name}.draft {name}'"
    job = lab.ok(line, **env).strip()
    lab.wait(job)
    return lab.text(name).rstrip("\n").split(":")


def folder(lab: SlurmLab) -> str:
    return str(lab.home / "slurm" / "bin")


def test_stand_behind_everything_else_in_path(lab: SlurmLab) -> None:
    found = path_of_a_job(lab, "plain")
    assert found == [*lab.env["PATH"].split(":"), folder(lab)]
    assert sorted(os.listdir(folder(lab))) == sorted(available_commands())


def test_are_there_without_the_submitters_environment(lab: SlurmLab) -> None:
    assert path_of_a_job(lab, "bare", "--export NONE")[-1] == folder(lab)
    line = f"env -u PATH {lab.bin}/gsub --parsable -t 5m --wrap '/usr/bin/printenv PATH > no-path'"
    lab.wait(lab.ok(line).strip())
    assert lab.text("no-path") == f"/usr/local/bin:/usr/bin:/bin:{folder(lab)}\n"


def test_are_there_with_a_path_of_the_users_own_and_with_an_empty_one(lab: SlurmLab) -> None:
    assert path_of_a_job(lab, "named", "--export PATH=/opt/tool") == ["/opt/tool", folder(lab)]
    # An empty PATH means the folder where one stands, which it still does.
    assert path_of_a_job(lab, "empty", "--export PATH=") == ["", folder(lab)]


def test_stay_where_the_user_has_put_them(lab: SlurmLab) -> None:
    own = f"{folder(lab)}:/usr/bin:/bin"
    assert path_of_a_job(lab, "own", f"--export PATH={own}") == own.split(":")


def test_are_found_by_a_script_for_a_login_shell(lab: SlurmLab) -> None:
    (lab.work / "fw.sh").write_text(
        "#!/bin/bash -l\n#SBATCH -t 5\n#SBATCH -o fw.out\nsrun echo task\n"
        "echo \"env: ${BASH_ENV-none}\"\nbash -c 'type -P srun'\n"
    )
    # Debian's profile sets PATH; others extend the one they find.
    lab.wait(lab.submit("fw.sh", HOME=str(lab.work)))
    task, env, place = lab.text("fw.out").splitlines()
    assert (task, env) == ("task", "env: none")
    assert place.endswith("/srun")


@pytest.mark.parametrize(
    ("first", "is_login"),
    [
        ("#!/bin/bash -l", True),
        ("#! /usr/bin/bash --login", True),
        ("#!/bin/bash -el", True),
        ("#!/usr/bin/env -S bash -l", True),
        ("#!/bin/bash", False),
        ("#!/bin/bash --posix", False),
        ("#!/bin/bash -e", False),
        ("#!/bin/sh -l", False),
        ("#!/bin/zsh -l", False),
        ("#!", False),
        ("", False),
        ("bash -l", False),
    ],
)
def test_a_login_bash_is_known_by_its_first_line(first: str, is_login: bool) -> None:
    assert is_login_bash(f"{first}\necho -l\n".encode()) is is_login


def test_a_job_submitted_by_a_job_has_them_once(lab: SlurmLab) -> None:
    inner = 'gsub --parsable -t 5m --wrap "printenv PATH > inner.draft; mv inner.draft inner"'
    lab.wait(lab.ok(f"gsub --parsable -t 5m --wrap '{inner}'").strip())
    assert lab.text("inner").rstrip("\n").split(":").count(folder(lab)) == 1


def test_a_job_finds_a_file_that_says_what_the_machine_is(own_lab: SlurmLab) -> None:
    own_lab.wait(own_lab.ok("gsub --parsable -t 5m --wrap 'cat $SLURM_CONF > conf.draft; mv conf.draft conf'").strip())
    lines = own_lab.text("conf").splitlines()
    assert lines[1:4] == [
        "ClusterName=lab",
        "SlurmctldHost=node1",
        "NodeName=node1 CPUs=8 RealMemory=24105 State=UNKNOWN",
    ]
    assert lines[4:] == [
        "PartitionName=main Nodes=node1 Default=YES MaxTime=1440 State=UP",
        "PartitionName=over Nodes=node1 Default=NO MaxTime=1440 State=UP",
        "PartitionName=debug Nodes=node1 Default=NO MaxTime=10 State=UP",
    ]
    config = own_lab.home / "config.toml"
    config.write_text(config.read_text().replace('cluster_name = "lab"', 'cluster_name = "attic"'))
    own_lab.ok("gctl reload")
    assert "ClusterName=attic\n" in (own_lab.home / "slurm" / "slurm.conf").read_text()


def test_are_left_out_by_the_settings(own_lab: SlurmLab) -> None:
    config = own_lab.home / "config.toml"
    config.write_text(config.read_text().replace("[slurm]\n", "[slurm]\ncommands_in_jobs = false\n"))
    assert folder(own_lab) not in path_of_a_job(own_lab, "without")


def test_a_folder_that_cannot_be_written_is_a_warning_and_no_obstacle(own_lab: SlurmLab) -> None:
    (own_lab.home / "slurm").write_text("in the way")
    assert path_of_a_job(own_lab, "without")[-1] == folder(own_lab)
    log = (own_lab.home / "log" / "gpuschedd.log").read_text()
    assert "WARNING gpusched.daemon: jobs cannot use Slurm's commands: " in log
    found = own_lab.type("gpusched doctor").out
    assert f"warn slurm commands: jobs have no srun, scontrol or sbatch: {own_lab.home}/slurm" in found


def test_are_renewed_by_the_next_daemon(own_lab: SlurmLab) -> None:
    stale = Path(folder(own_lab))
    stale.mkdir(parents=True)
    for name in COMMANDS:
        (stale / name).write_bytes(executable_text(name) + b"# of an older release\n")
    own_lab.ok("gq")
    assert sorted(os.listdir(stale)) == sorted(available_commands())
    assert all((stale / name).read_bytes() == executable_text(name) for name in available_commands())


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become other users")
def test_of_the_system_daemon_can_be_run_by_everybody_and_written_by_nobody_else() -> None:
    from people import ANN, SystemDaemon

    daemon = SystemDaemon()
    daemon.start()
    try:
        place = daemon.state_dir / "slurm" / "bin"
        work = daemon.home / "open"
        work.mkdir()
        work.chmod(0o777)
        job = daemon.person(ANN).submit("/usr/bin/printenv", "PATH", stdout=f"{work}/path")
        daemon.wait(job)
        assert (work / "path").read_text() == f"/usr/bin:/bin:{place}\n"
        for one in (place, place.parent, *place.iterdir()):
            found = one.stat()
            assert (found.st_uid, found.st_mode & 0o777) == (0, 0o755), one
        (check,) = [one for one in daemon.call("GET", "/v1/doctor")["checks"] if one["check"] == "slurm commands"]
        reached = unreachable_part([str(place), sys.executable, *import_folders()])
        assert check["text"] == (
            f"at the end of every job's PATH: {place}"
            if reached is None
            else f"jobs have no srun, scontrol or sbatch: {reached}"
        )
    finally:
        daemon.close()
