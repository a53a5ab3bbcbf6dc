"""The Debian package on a server: installation, upgrade under a running job, removal, purge.

    python -m tools.package FOLDER
    python -m pytest tests/server/test_package.py --server root@host --server-destroys \\
        --package FOLDER/gpusched_*.deb --newer-package OTHER/gpusched_*.deb
"""

from __future__ import annotations

from pathlib import Path

import pytest
from machine import Machine

UNIT = "gpusched.service"
FOREVER = "-- sleep 1000000"


@pytest.fixture(scope="module")
def packages(request: pytest.FixtureRequest) -> tuple[bytes, bytes]:
    """The package, and one of a later release."""
    names = [request.config.getoption(option, default=None) for option in ("--package", "--newer-package")]
    if not all(names):
        pytest.skip("no packages to install: --package FILE --newer-package FILE")
    first, second = (Path(str(name)).read_bytes() for name in names)
    return first, second


def put(machine: Machine, package: bytes) -> str:
    machine.root("cat > /root/gpusched.deb", stdin=package)
    return "/root/gpusched.deb"


def test_a_package_refuses_to_mix_with_an_environment_of_pip(machine: Machine, packages: tuple[bytes, bytes]) -> None:
    for user in (machine.alice, machine.bob, machine.carol):
        machine.root(f"id {user} >/dev/null 2>&1 || useradd -m -s /bin/bash {user}")
    machine.try_("gpusched system uninstall --yes --force --purge; dpkg --purge gpusched")
    machine.root("rm -rf /opt/gpusched /etc/gpusched /var/lib/gpusched && mkdir -p /opt/gpusched")
    machine.root("touch /opt/gpusched/pyvenv.cfg")
    refused = machine.try_(f"dpkg -i {put(machine, packages[0])}")
    assert refused.code != 0
    assert "holds an installation made with pip" in refused.err
    assert "sudo rm -r /opt/gpusched" in refused.err
    machine.root("rm -r /opt/gpusched")


def test_a_package_starts_nothing_and_names_the_next_command(machine: Machine, packages: tuple[bytes, bytes]) -> None:
    told = machine.root(f"dpkg -i {put(machine, packages[0])}")
    assert "sudo gpusched system install" in told
    assert machine.try_(f"systemctl cat {UNIT}").code != 0
    assert machine.try_("pgrep -f 'gpuschedd|gpusched.daemon'").code != 0
    assert machine.as_(machine.alice, "readlink -f $(which gsub)").strip() == "/opt/gpusched/bin/gsub"
    assert "(1)" in machine.root("gzip -dc /usr/share/man/man1/gsub.1.gz | grep -F '(1)'")
    assert machine.root("dpkg --verify gpusched") == ""


def test_the_scheduler_of_a_package_runs_jobs(machine: Machine, packages: tuple[bytes, bytes]) -> None:
    machine.root("gpusched system install --yes")
    machine.wait(machine.answers, "the daemon answers")
    assert machine.try_("ls /usr/local/bin/gsub /usr/local/share/man/man1/gsub.1").out == ""
    job_id = machine.submit(machine.alice, "-- true")
    machine.wait_for(job_id, "COMPLETED", times=2)
    assert machine.root("dpkg --verify gpusched") == "", "running it has written nothing into the package"


def test_an_upgrade_of_the_package_keeps_running_jobs(machine: Machine, packages: tuple[bytes, bytes]) -> None:
    job_id = machine.running(machine.alice, FOREVER)
    pids = machine.pids(job_id)
    daemon = machine.daemon_pid()
    told = machine.root(f"dpkg -i {put(machine, packages[1])}")
    assert "sudo gpusched system install" in told
    assert machine.daemon_pid() == daemon, "the package has restarted nothing"
    assert machine.job(job_id)["state"] == "RUNNING"
    done = machine.root("gpusched system install --yes")
    assert "jobs keep running" in done
    release = machine.root("gpusched --version").split()[-1]
    assert release in machine.root("gpusched daemon status")
    assert (machine.job(job_id)["state"], machine.pids(job_id)) == ("RUNNING", pids)
    other = machine.submit(machine.bob, "-- true")
    machine.wait_for(other, "COMPLETED", times=2)
    # Removal would leave a run that nothing records: refused, and the package stays.
    refused = machine.try_("dpkg --remove gpusched")
    assert refused.code != 0
    assert "1 job still running" in refused.err
    assert "install ok installed" in machine.root("dpkg -s gpusched")
    assert machine.job(job_id)["state"] == "RUNNING"
    machine.as_(machine.alice, f"gcancel {job_id}")
    machine.wait_for(job_id, "CANCELLED")
    machine.wait(lambda: machine.try_("gq --json -s R,CG").out.count('"id"') == 0, "no job runs")


def test_removal_keeps_settings_and_table_and_purge_only_the_table(
    machine: Machine, packages: tuple[bytes, bytes]
) -> None:
    machine.root("dpkg --remove gpusched")
    assert machine.try_(f"systemctl cat {UNIT}").code != 0
    assert machine.try_("ls -d /opt/gpusched /usr/bin/gsub /etc/pam.d/gpusched /run/gpusched").out == ""
    machine.root("test -e /etc/gpusched/config.toml && test -e /var/lib/gpusched/gpusched.db")
    told = machine.root("dpkg --purge gpusched")
    assert "sudo rm -r /var/lib/gpusched" in told
    assert machine.try_("ls -d /etc/gpusched").out == ""
    machine.root("test -e /var/lib/gpusched/gpusched.db && rm -r /var/lib/gpusched")
    others = " ".join(f"-not -path '/{folder}/*'" for folder in ("home", "root", "srv", "tmp", "mnt"))
    assert machine.try_(f"find / -xdev -name '*gpusched*' {others}").out == "", "only outputs of jobs stay"
