"""A scheduler for everybody, from a fresh server to its removal. What it needs and does: `conftest.py`."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from collections.abc import Iterator

import pytest
from machine import REPOSITORY, SOURCE, Machine

UNIT = "gpusched.service"
FOREVER = "-- sleep 1000000"


def readme_commands(first_word: str = "sudo") -> list[str]:
    """What the README says to type, word by word: to install it, or as one of its users."""
    text = (REPOSITORY / "README.md").read_text()
    section = text[text.index("## For a whole server") :]
    section = section[: section.index("\n## ", 5)]
    return [line.strip() for line in re.findall(rf"^    ((?:{first_word})\b.*)$", section, re.M)]


def test_a_fresh_install_follows_the_readme(machine: Machine) -> None:
    for user in (machine.alice, machine.bob, machine.carol):
        machine.root(f"id {user} >/dev/null 2>&1 || useradd -m -s /bin/bash {user}")
    machine.try_(f"systemctl stop {UNIT}; systemctl kill -s KILL 'gpusched-*.service'")
    machine.try_("gpusched system uninstall --yes --force --purge")
    machine.root("rm -rf /etc/gpusched /var/lib/gpusched /etc/systemd/system/gpusched* /etc/pam.d/gpusched")
    machine.root("systemctl daemon-reload")
    machine.put_source()
    venv, pip, install = readme_commands()
    assert install.endswith("gpusched system install")
    if machine.keeps_environment:
        machine.root(f"cd {SOURCE} && {pip.replace('install', 'install --no-deps --force-reinstall', 1)}")
    else:
        machine.root("rm -rf /opt/gpusched")
        machine.root(f"cd {SOURCE} && {venv} && {pip}")
    plan = machine.root(f"{install} --plan")
    assert f"write   /etc/systemd/system/{UNIT}" in plan
    assert not machine.root("ls /etc/systemd/system").count("gpusched")
    refused = machine.try_(install)
    assert (refused.code, "--yes" in refused.err) == (1, True), refused.err
    done = machine.typed(f"cd {SOURCE} && {install}", "y\n")
    assert done.code == 0, done.out + done.err
    assert "Proceed?" in done.out
    assert machine.root(f"systemctl is-active {UNIT}; systemctl is-enabled {UNIT}").split() == ["active", "enabled"]
    assert machine.root(install).strip() == "nothing to do"


def test_root_does_not_run_user_writable_files(machine: Machine) -> None:
    machine.root(f"chown {machine.bob} /opt/gpusched/lib")
    try:
        refused = machine.try_("/opt/gpusched/bin/gpusched system install --yes")
    finally:
        machine.root("chown root /opt/gpusched/lib")
    assert refused.code == 1
    assert f"/opt/gpusched/lib belongs to {machine.bob}" in refused.err


def test_gpus_are_simulated_where_there_are_none(machine: Machine) -> None:
    if machine.try_("nvidia-smi -L || grep -q '^fake' /etc/gpusched/config.toml").code != 0:
        machine.root("printf '[gpu]\\nfake = \"2x24GiB\"\\n' >> /etc/gpusched/config.toml")
    machine.root(f"gpusched config check && systemctl restart {UNIT}")
    machine.wait(lambda: json.loads(machine.root("ginfo --json"))["gpus"], "GPUs")


def test_the_doctor_reports_no_problem(machine: Machine) -> None:
    for user in ("root", machine.alice):
        done = machine.try_("gpusched doctor", user)
        assert done.code == 0, done.out
        assert f"ok   service: {UNIT} is running" in done.out
    assert "journalctl -u gpusched" in machine.root("gpusched daemon status")


def test_the_sandbox_score_is_good(machine: Machine) -> None:
    text = machine.root(f"systemd-analyze security --no-pager {UNIT} gpusched-metrics.service | cat")
    scores = [
        float(machine.root(f"systemd-analyze security --no-pager {unit} | tail -1").split()[-3])
        for unit in (UNIT, "gpusched-metrics.service")
    ]
    assert scores[0] <= 4.0, text
    assert scores[1] <= 1.5, text


def test_two_users_run_the_readme_commands(machine: Machine) -> None:
    submits, looks = readme_commands("gsub|gq")
    told = [machine.as_(user, submits) for user in (machine.alice, machine.bob)]
    ids = [text.split()[-1] for text in told]
    for job_id in ids:
        machine.wait_for(job_id, "RUNNING", "COMPLETED", times=2)
    if len(json.loads(machine.root("ginfo --json"))["gpus"]) > 1:
        rows = machine.as_(machine.alice, looks)
        assert machine.alice in rows
        assert machine.bob in rows
    machine.root(f"gcancel {' '.join(ids)}")


# --- two users ----------------------------------------------------------------------------------------


def test_jobs_of_two_users_run_as_them_with_their_groups_and_files(machine: Machine) -> None:
    for user in (machine.alice, machine.bob):
        job_id = machine.submit(user, "-g 1 -o id.out --wrap 'id; pwd; umask; cat /proc/self/cgroup'")
        machine.wait_for(job_id, "COMPLETED", times=2)
        told = machine.as_(user, "cat id.out; stat -c 'owner %U' id.out")
        assert machine.as_(user, "id").split(" context=")[0].strip() in told
        assert f"owner {user}" in told
        assert f"gpusched-{job_id}.1.service" in told, "a unit of its own"


def test_users_can_neither_see_nor_touch_foreign_jobs(machine: Machine) -> None:
    job_id = machine.running(machine.alice, "-J shown-name --wrap 'sleep 1000000; : secret-word'")
    for command in ("gcancel", "gctl hold", "gctl requeue", "glogs"):
        done = machine.try_(f"{command} {job_id}", machine.bob)
        assert done.code == 1, f"{command}: {done.out}"
    for text in (machine.as_(machine.bob, "gq -a"), machine.as_(machine.bob, f"gshow {job_id}")):
        assert "shown-name" in text
        assert "secret-word" not in text
    assert "secret-word" in machine.root(f"gshow {job_id}")
    assert machine.try_("gctl drain 0 -m no", machine.bob).code == 1
    assert machine.try_("gctl reload", machine.bob).code == 1
    assert machine.try_("cat /var/lib/gpusched/gpusched.db", machine.bob).code != 0
    assert machine.try_("ls /var/lib/gpusched /var/lib/gpusched/log", machine.bob).code != 0
    assert machine.job(job_id)["state"] == "RUNNING"
    machine.as_(machine.alice, f"gcancel {job_id}")
    machine.wait_for(job_id, "CANCELLED")


def test_another_uid_cannot_be_forged(machine: Machine) -> None:
    code = """
import json, socket
s = socket.socket(socket.AF_UNIX); s.connect("/run/gpusched/api.sock")
spec = {"argv": ["id"], "env": {"USER": "root"}, "work_dir": "/tmp", "user": "root", "uid": 0, "stdout": "/dev/null"}
body = json.dumps({"spec": spec, "uid": 0, "user": "root"}).encode()
head = "POST /v1/jobs HTTP/1.1\\r\\nHost: x\\r\\nX-Remote-User: root\\r\\nContent-Length: %d\\r\\n\\r\\n" % len(body)
s.sendall(head.encode() + body); print(s.recv(65536).decode().partition("\\r\\n\\r\\n")[2])
"""
    answer = json.loads(machine.as_(machine.bob, f"python3 -c {shlex.quote(code)}"))
    if "job" in answer:
        assert machine.job(answer["job"]["id"])["user"] == machine.bob
    else:
        assert "error" in answer


def test_logs_do_not_follow_a_link_to_etc(machine: Machine) -> None:
    machine.as_(machine.bob, "ln -sf /etc/gpusched-was-here link.out; ln -sf /etc/passwd passwd.out")
    before = machine.root("sha256sum /etc/passwd")
    for name in ("link.out", "passwd.out"):
        job_id = machine.submit(machine.bob, f"-o {name} -- echo broken::0:0::/:/bin/sh")
        assert machine.wait_for(job_id, "FAILED", times=2)["reason"] == "JobLaunchFailure"
    assert machine.try_("test -e /etc/gpusched-was-here").code != 0
    assert machine.root("sha256sum /etc/passwd") == before


def test_an_environment_is_visible_to_its_job_alone(machine: Machine) -> None:
    """A library that cannot be loaded leaves a line wherever it was tried: in the job's output, and nowhere else."""
    words = "-o env.out -E LD_PRELOAD=/nowhere/evil.so -E LD_LIBRARY_PATH=/nowhere -E PYTHONSTARTUP=/nowhere/x"
    words += " -E BASH_ENV=/nowhere/x -E 'EVIL=a\nUser=root' -E NOTIFY_SOCKET=/run/systemd/notify --wrap 'id -u; env'"
    job_id = machine.submit(machine.bob, words)
    machine.wait_for(job_id, "COMPLETED", times=2)
    told = machine.as_(machine.bob, "cat env.out")
    assert machine.root(f"id -u {machine.bob}").strip() in told.splitlines()
    assert "evil.so" in told
    journal = f"journalctl -u {UNIT} -u gpusched-{job_id}.1.service --no-pager"
    assert "evil.so" not in machine.root(f"{journal}; cat /var/lib/gpusched/spool/*.log")


def test_dollars_and_percents_are_kept(machine: Machine) -> None:
    machine.as_(machine.bob, "rm -f dollar.out; gsub --wait -o dollar.out -- echo '$HOME' '$$' '%H' '${PATH}'")
    assert machine.as_(machine.bob, "cat dollar.out").strip() == "$HOME $$ %H ${PATH}"


def test_no_process_escapes_the_end_of_its_job(machine: Machine) -> None:
    sleep = "sleep 765432"
    escape = f"(setsid sh -c 'trap \"\" TERM HUP; setsid {sleep} & {sleep}' &); setsid -f {sleep}; {sleep}"
    job_id = machine.running(machine.alice, f"--grace 1s --wrap {shlex.quote(escape)}")
    machine.wait(lambda: machine.try_("pgrep -fc '^sleep 765432'").out.strip() == "4", "all four sleep")
    machine.as_(machine.alice, f"gcancel {job_id}")
    machine.wait_for(job_id, "CANCELLED", times=2)
    assert machine.try_("pgrep -f '^sleep 765432'").code == 1


def test_a_unit_stopped_by_an_admin_is_cancelled(machine: Machine) -> None:
    job_id = machine.running(machine.alice, FOREVER)
    machine.root(f"systemctl stop gpusched-{job_id}.1.service")
    assert machine.wait_for(job_id, "CANCELLED")["run"] == 1


OPEN = """
import errno, glob, os
for path in sorted(glob.glob("/dev/nvidia[0-9]*")):
    try:
        os.close(os.open(path, os.O_RDWR))
    except OSError as error:
        # Without a driver behind it the node of a GPU that may be opened says that there is no such device.
        print(path, "refused" if error.errno == errno.EPERM else "open")
    else:
        print(path, "open")
"""


@pytest.fixture
def gpu_nodes(machine: Machine) -> Iterator[None]:
    """Nodes of GPUs: the driver's, or some without any driver."""
    made = "0 1 255"
    if machine.try_("test -e /proc/driver/nvidia").code == 0:
        made = ""
    for minor in made.split():
        path = f"/dev/nvidia{'ctl' if minor == '255' else minor}"
        machine.root(f"test -e {path} || mknod -m 666 {path} c 195 {minor}")
    machine.root("cat > /usr/local/share/gpusched-open.py", stdin=OPEN)
    yield
    machine.root("rm /usr/local/share/gpusched-open.py")
    if made:
        machine.root("rm -f /dev/nvidia0 /dev/nvidia1 /dev/nvidiactl")


def test_a_job_opens_only_its_own_gpus(machine: Machine, gpu_nodes: None) -> None:
    for gpus, opened in ((1, 1), (0, 0)):
        words = f"-g {gpus} -o open.out -- python3 /usr/local/share/gpusched-open.py"
        job_id = machine.submit(machine.bob, words)
        machine.wait_for(job_id, "COMPLETED", times=2)
        told = machine.as_(machine.bob, "cat open.out")
        assert told.count("open\n") == opened, told
        assert told.count("refused") == len(told.splitlines()) - opened, told


def test_the_guard_keeps_logins_but_not_jobs_off_the_gpus(machine: Machine, gpu_nodes: None) -> None:
    look = "python3 /usr/local/share/gpusched-open.py"
    before = machine.as_(machine.bob, look)
    assert "refused" not in before
    machine.root("gpusched system guard on")
    try:
        assert "open" not in machine.as_(machine.bob, look).replace("gpusched-open", "")
        job_id = machine.submit(machine.bob, f"-g 1 -o guard.out -- {look}")
        machine.wait_for(job_id, "COMPLETED", times=2)
        assert machine.as_(machine.bob, "cat guard.out").count("open\n") == 1
    finally:
        machine.root("gpusched system guard off")
    assert machine.as_(machine.bob, look) == before


def test_a_job_that_exceeds_its_memory_is_ended(machine: Machine) -> None:
    job_id = machine.submit(machine.bob, "-m 64M -- python3 -c 'b = bytearray(300 << 20); print(len(b))'")
    assert machine.wait_for(job_id, "OUT_OF_MEMORY", times=2)["reason"] == "MemoryLimit"


# --- the daemon comes and goes --------------------------------------------------------------------------

WAYS = {
    "restart": f"systemctl restart {UNIT}",
    "kill -9": f"kill -9 $(systemctl show -p MainPID --value {UNIT})",
    "daemon-reload": "systemctl daemon-reload",
    "daemon-reexec": "systemctl daemon-reexec",
}


@pytest.mark.parametrize("way", WAYS)
def test_jobs_are_unaffected_by(machine: Machine, way: str) -> None:
    job_id = machine.running(machine.alice, f"-g 1 {FOREVER}")
    pids = machine.pids(job_id)
    assert pids
    machine.root(WAYS[way])
    machine.wait(machine.answers, "the daemon answers", 3)
    job = machine.job(job_id)
    assert (job["state"], job["run"]) == ("RUNNING", 1)
    assert machine.pids(job_id) == pids
    unit = machine.root(f"systemctl show -p LoadState,ActiveState gpusched-{job_id}.1.service")
    assert unit.split() == ["LoadState=loaded", "ActiveState=active"]
    machine.as_(machine.alice, f"gcancel {job_id}")
    machine.wait_for(job_id, "CANCELLED")


def test_an_exit_code_is_kept_while_the_daemon_is_away(machine: Machine) -> None:
    job_id = machine.running(machine.alice, "--wrap 'while ! test -e go; do sleep 0.2; done; rm go; exit 7'")
    pids = machine.pids(job_id)
    machine.root(f"systemctl stop {UNIT}")
    refused = machine.try_("gq", machine.alice)
    assert (refused.code, "systemctl status gpusched" in refused.err) == (1, True), refused.err
    assert machine.try_("ls ~/.local/state/gpusched", machine.alice).code != 0, "no daemon of their own"
    machine.as_(machine.alice, "touch go")
    gone = " && ".join(f"! test -e /proc/{pid}" for pid in pids)
    machine.wait(lambda: machine.try_(gone).code == 0, "the job's processes are gone")
    machine.root(f"systemctl start {UNIT}")
    assert machine.wait_for(job_id, "FAILED")["exit_code"] == 7


def test_a_hanging_daemon_is_restarted(machine: Machine) -> None:
    job_id = machine.running(machine.alice, FOREVER)
    pid = machine.daemon_pid()
    machine.root(f"kill -STOP {pid}")
    machine.wait(lambda: machine.daemon_pid() not in ("0", pid), "another daemon", 5)
    machine.wait(machine.answers, "the daemon answers", 3)
    journal = machine.root(f"journalctl -u {UNIT} --no-pager -n 200")
    assert "Watchdog timeout" in journal
    assert "File " in journal, "the trace of where it hung"
    assert machine.job(job_id)["run"] == 1
    machine.as_(machine.alice, f"gcancel {job_id}")


def test_settings_are_reloaded_and_invalid_ones_refused(machine: Machine) -> None:
    pid = machine.daemon_pid()
    config = "/etc/gpusched/config.toml"

    def limit_of_a_new_job() -> object:
        job_id = machine.submit(machine.alice, "--hold -- true")
        machine.as_(machine.alice, f"gcancel {job_id}")
        return machine.job(job_id)["time_limit_s"]

    machine.root(f"cp {config} {config}.kept")
    try:
        machine.root(f"printf '[default]\\ntime_limit_s = 4321\\n' >> {config} && systemctl reload {UNIT}")
        assert limit_of_a_new_job() == 4321
        machine.root(f"sed -i s/4321/1234/ {config} && printf 'nonsense = 1\\n' >> {config}")
        assert machine.try_(f"systemctl reload {UNIT}").code != 0
        assert limit_of_a_new_job() == 4321
    finally:
        machine.root(f"mv {config}.kept {config} && systemctl reload {UNIT}")
    assert limit_of_a_new_job() is None
    assert machine.daemon_pid() == pid


def test_a_restart_with_invalid_settings_keeps_the_last_good_ones(machine: Machine) -> None:
    config = "/etc/gpusched/config.toml"
    job_id = machine.running(machine.alice, FOREVER)
    machine.root(f"cp {config} {config}.kept")
    try:
        machine.root(f"printf '[default]\\nnonsense = 1\\n' >> {config} && systemctl restart {UNIT}")
        admin, user = machine.try_("gq"), machine.try_("gq", machine.alice)
        assert (admin.code, user.code) == (0, 0), (admin, user)
        assert "unknown setting default.nonsense" in admin.err
        assert "gpusched config check" in admin.err
        assert user.err == ""
        assert machine.job(job_id)["run"] == 1
    finally:
        machine.root(f"mv {config}.kept {config} && systemctl reload {UNIT}")
    assert machine.try_("gq").err == ""
    machine.as_(machine.alice, f"gcancel {job_id}")


def test_an_upgrade_in_place_leaves_jobs_alone(machine: Machine) -> None:
    job_id = machine.running(machine.alice, FOREVER)
    pids = machine.pids(job_id)
    machine.root(f"cd {SOURCE} && sed -i 's/^__version__ = .*/__version__ = \"99.0\"/' gpusched/__init__.py")
    machine.root(f"cd {SOURCE} && /opt/gpusched/bin/pip install --quiet --no-deps --upgrade .")
    told = machine.root("gpusched system install --yes")
    assert "restart" in told
    assert "jobs keep running" in told
    assert "99.0" in machine.root("gpusched daemon status")
    assert machine.job(job_id)["state"] == "RUNNING"
    assert machine.pids(job_id) == pids
    other = machine.submit(machine.bob, "-- true")
    machine.wait_for(other, "COMPLETED", times=2)
    machine.as_(machine.alice, f"gcancel {job_id}")


def test_an_older_release_refuses_a_newer_table(machine: Machine) -> None:
    table = "/var/lib/gpusched/gpusched.db"
    pragma = "import sqlite3, sys; d = sqlite3.connect(sys.argv[1])"
    pragma += "; print(d.execute('PRAGMA user_version').fetchone()[0])"
    pragma += "; d.execute('PRAGMA user_version = ' + sys.argv[2])"
    machine.root(f"systemctl stop {UNIT}")
    schema = machine.root(f"python3 -c {shlex.quote(pragma)} {table} 999").strip()
    try:
        assert machine.try_(f"systemctl start {UNIT}").code != 0
        assert "has schema version 999" in machine.root(f"journalctl -u {UNIT} --no-pager -n 50")
    finally:
        machine.root(f"systemctl stop {UNIT}; python3 -c {shlex.quote(pragma)} {table} {schema}")
        machine.root(f"systemctl reset-failed {UNIT}; systemctl start {UNIT}")
    assert machine.answers()


def test_prometheus_metrics_come_from_an_unprivileged_process(machine: Machine) -> None:
    machine.root("systemctl start gpusched-metrics")
    ask = "python3 -c \"import urllib.request as u; print(u.urlopen('http://127.0.0.1:9835/metrics').read().decode())\""
    machine.wait(lambda: "\ngpusched_up 1" in machine.try_(ask).out, "gpusched_up 1")
    pid = machine.root("systemctl show -p MainPID --value gpusched-metrics").strip()
    assert machine.root(f"stat -c %u /proc/{pid}").strip() not in ("", "0")
    machine.root("systemctl stop gpusched-metrics")


def test_a_backup_is_restored(machine: Machine) -> None:
    held = machine.submit(machine.alice, "--hold -- true")
    machine.root("gpusched backup /srv/gpusched-tried.db")
    later = machine.submit(machine.alice, "--hold -- true")
    assert machine.try_("gpusched restore /srv/gpusched-tried.db").code == 1, "the daemon runs"
    machine.root(f"systemctl stop {UNIT}; gpusched restore /srv/gpusched-tried.db; systemctl start {UNIT}")
    assert machine.job(held)["state"] == "PENDING"
    assert machine.try_(f"gshow {later}").code == 1
    machine.root(f"gcancel {held}")


def test_with_the_fork_launcher_jobs_are_not_sandboxed_and_survive_a_restart(machine: Machine) -> None:
    config = "/etc/gpusched/config.toml"
    machine.root(f"cp {config} {config}.kept && printf '[daemon]\nlauncher = \"fork\"\n' >> {config}")
    try:
        machine.root(f"systemctl restart {UNIT}")
        warned = machine.try_("gq").err
        assert "runs could not leave the daemon's sandbox" in warned, "it goes on with the settings from before"
        assert "gpusched system install" in warned
        assert "10-fork.conf" in machine.root("gpusched system install --yes")
        job_id = machine.running(machine.alice, "-o fork.out --wrap 'grep NoNewPrivs /proc/self/status; sleep 1000000'")
        pids = machine.pids(job_id)
        machine.root(f"systemctl restart {UNIT}")
        assert (machine.job(job_id)["state"], machine.pids(job_id)) == ("RUNNING", pids)
        assert machine.as_(machine.alice, "cat fork.out").split() == ["NoNewPrivs:", "0"]
        machine.as_(machine.alice, f"gcancel {job_id}")
        machine.wait_for(job_id, "CANCELLED")
    finally:
        machine.root(f"mv {config}.kept {config}; systemctl reset-failed {UNIT}; gpusched system install --yes")
    assert machine.try_(f"ls /etc/systemd/system/{UNIT}.d").code != 0


# --- the machine goes down ------------------------------------------------------------------------------


def test_a_reboot_notifies_jobs_and_they_return(machine: Machine) -> None:
    trap = "trap 'echo got TERM >> notice; exit 3' TERM; while :; do sleep 0.2; done"
    machine.as_(machine.alice, "rm -f notice")
    told = machine.running(machine.alice, f"-g 1 --wrap {shlex.quote(trap)}")
    saved = machine.running(machine.bob, "--wrap 'trap \"exit 0\" TERM; while :; do sleep 0.2; done'")
    say_done = "trap 'echo done > \"$GPUSCHED_CHECKPOINT_FILE\"; exit 0' TERM; while :; do sleep 0.2; done"
    done = machine.running(machine.bob, f"--wrap {shlex.quote(say_done)}")
    once = machine.running(machine.bob, f"--no-requeue {FOREVER}")
    held = machine.submit(machine.carol, f"--hold {FOREVER}")
    machine.boots_again(lambda: machine.try_("systemctl reboot", fresh=True) and None)
    assert machine.as_(machine.alice, "head -1 notice").strip() == "got TERM"
    job = machine.wait_for(told, "RUNNING", times=3)
    assert job["run"] == 2
    first = job["runs"][0]
    assert (first["outcome"], first["reason"]) == ("NODE_FAIL", "NodeDown"), first
    assert "shut down" in first["reason_text"]
    assert machine.wait_for(saved, "RUNNING", times=3)["run"] == 2
    assert machine.job(done)["state"] == "COMPLETED"
    lost = machine.job(once)
    assert (lost["state"], lost["reason"]) == ("NODE_FAIL", "NodeDown")
    assert machine.job(held)["state"] == "PENDING"
    machine.root(f"gcancel {told} {saved} {held}")


def test_a_power_cut_loses_no_acknowledged_commit(machine: Machine) -> None:
    if machine.power_cut is None:
        pytest.skip("nobody cuts the power here: --power-cut-command")
    command = machine.power_cut
    runs = machine.running(machine.alice, FOREVER)
    once = machine.running(machine.alice, f"--no-requeue {FOREVER}")
    ids = [machine.submit(machine.carol, f"--hold {FOREVER}") for _ in range(5)]
    machine.boots_again(lambda: subprocess.run(command, shell=True, check=True) and None)
    for job_id in ids:
        assert machine.job(job_id)["state"] == "PENDING"
    job = machine.wait_for(runs, "RUNNING", times=3)
    assert (job["run"], job["runs"][0]["reason"]) == (2, "NodeDown")
    assert machine.job(once)["state"] == "NODE_FAIL"
    machine.root(f"gcancel {runs} {' '.join(ids)}")


# --- the end --------------------------------------------------------------------------------------------


def test_removal_is_refused_under_running_jobs_and_reinstallation_keeps_the_table(machine: Machine) -> None:
    job_id = machine.running(machine.alice, FOREVER)
    kept = machine.submit(machine.bob, "--hold -- true")
    refused = machine.try_("gpusched system uninstall --yes")
    assert (refused.code, "run" in refused.err) == (1, True), refused.err
    machine.as_(machine.alice, f"gcancel {job_id}")
    machine.wait_for(job_id, "CANCELLED")
    machine.wait(lambda: not json.loads(machine.root("gq --json -s R,CG"))["jobs"], "no job runs")
    machine.root("/opt/gpusched/bin/gpusched system uninstall --yes")
    assert machine.try_("ls /usr/local/bin/gsub /etc/pam.d/gpusched /run/gpusched").out == ""
    assert machine.try_(f"systemctl cat {UNIT}").code != 0
    machine.root("/opt/gpusched/bin/gpusched system install --yes")
    assert machine.job(kept)["state"] == "PENDING"
    machine.root("/opt/gpusched/bin/gpusched system uninstall --yes --purge")
    assert machine.try_("ls -d /etc/gpusched /var/lib/gpusched").out == ""


def test_the_server_is_left_unchanged(machine: Machine) -> None:
    left = machine.root("systemctl list-units --all --no-legend 'gpusched*.service' | cat")
    assert not left.strip(), left
    assert machine.root("systemctl list-units --all --no-legend 'gpusched*.slice' | cat").strip() == ""
    assert machine.try_("pgrep -af 'gpusched.daemon|gpuschedd'").out == ""
