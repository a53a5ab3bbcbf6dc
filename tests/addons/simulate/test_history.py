"""Jobs of gpusched's own table, replayed: what is read of them, and what the command makes of it."""

from __future__ import annotations

import json
import os
import sqlite3

import pytest
from history_builders import AT, Lab

from gpusched.addons.simulate.history import read_history, read_machine
from gpusched.addons.simulate.trace import BadTrace
from gpusched.cli.admin import main
from gpusched.errors import Forbidden, NotFound, NotReady, StoreBroken
from gpusched.gpu.host import PsutilHost
from gpusched.model.settings import NodeSettings, Settings
from gpusched.model.states import JobState
from gpusched.periods import period_at
from gpusched.store.read_only import open_to_read
from gpusched.testing import request, spec


@pytest.fixture
def path(tmp_path):
    return tmp_path / "home" / "gpusched.db"


@pytest.fixture
def lab(path):
    made = Lab(path)
    yield made
    made.close()


def test_jobs_and_runs_match_their_records(path, lab):
    lab.ran(100, 30.4, 500.0, ends=("FAILED", "COMPLETED"), gpus=2, user="eva", queue="theory", time_limit_s=900)
    lab.ran(40, 10.0, user="ann", name="train")
    trace = read_history(str(path))
    eva, ann = trace.jobs
    assert (eva.id, eva.submit_s, eva.run_s, eva.estimate_s, eva.gpus) == ("1", 60, 500, 900, 2)
    assert (eva.user, eva.queue, eva.attempts) == ("eva", "theory", ((30, "failed"), (500, "completed")))
    assert (eva.spec.time_limit_s, eva.spec.request.gpus, eva.spec.queue) == (900, 2, "theory")
    assert (ann.submit_s, ann.run_s, ann.estimate_s, ann.name) == (0, 10, 10, "train")
    assert not trace.dropped


def test_a_deadline_is_known_and_not_enforced(path, lab):
    lab.ran(100, 30.0, deadline_at=AT + 400)
    lab.ran(110, 30.0)
    kept, free = read_history(str(path)).jobs
    assert (kept.submit_s, kept.deadline_s, kept.spec.deadline_at) == (0, 300, None)
    assert free.deadline_s is None


def test_preempted_and_lost_runs_do_not_count_as_run_times(path, lab):
    lab.ran(0, 77.0, 20.0, 300.0, ends=("PREEMPTED", "NODE_FAIL", "COMPLETED"))
    lab.ran(0, 44.0, ends=("NODE_FAIL",))
    first, second = read_history(str(path)).jobs
    assert first.attempts == ((300, "completed"),)
    assert second.attempts == ((44, "node_fail"),)


def test_unreplayable_jobs_are_counted_and_named(path, lab):
    lab.ran(0, 10.0)
    lab.ran(5)
    lab.waits(6)
    trace = read_history(str(path))
    assert {why: one.named for why, one in trace.dropped.items()} == {
        "did not run": ["2"],
        "had not ended yet": ["3"],
    }


def test_a_job_arrives_once_only_the_scheduler_delays_it(path, lab):
    lab.ran(0, 100.0)
    lab.ran(10, 50.0, wait_s=400.0, dependency="afterok:1")
    lab.ran(20, 50.0, wait_s=400.0, queued_at=AT + 300)
    # Of another that ended after it started, with `after:` for example, nothing follows.
    lab.ran(30, 50.0, wait_s=5.0, dependency="after:2")
    assert [job.submit_s for job in read_history(str(path)).jobs] == [0, 100, 300, 30]


def test_a_held_job_arrives_at_its_release(path, lab):
    held = lab.ran(0, 50.0, wait_s=700.0, spec=spec(hold=True))
    lab.tell(held, 640, "released")
    lab.ran(0, 50.0)
    assert [job.submit_s for job in read_history(str(path)).jobs] == [640, 0]


def test_references_to_other_jobs_instants_and_people_are_dropped(path, lab):
    named = {"dependency": "afterany:1", "reservation": "talk", "key": "k", "hold": True, "fallback": "true"}
    lab.ran(0, 100.0, spec=spec(deadline_at=AT + 500, begin_at=AT, **named))
    (job,) = read_history(str(path)).jobs
    again = job.spec
    assert (again.deadline_at, again.begin_at, again.dependency, again.reservation) == (None,) * 4
    assert (again.key, again.fallback, again.hold) == (None, None, False)


def test_only_jobs_since_an_instant_are_read(path, lab):
    lab.ran(0, 100.0)
    lab.ran(1000, 100.0)
    assert [job.id for job in read_history(str(path), AT + 500).jobs] == ["2"]
    with pytest.raises(BadTrace, match="holds no job to replay") as caught:
        read_history(str(path), AT + 5000)
    assert "--since" in caught.value.hint


def test_the_machine_is_this_one_with_its_last_seen_gpus(path, lab):
    node = read_machine(str(path), Settings(node=NodeSettings(name="n1", cpus=12.0, mem_mib=4096)))
    assert (node.name, node.cpus, node.mem_mib) == ("n1", 12.0, 4096)
    assert [(card.index, card.name, card.vram_total_mib) for card in node.gpus] == [
        (index, "A100", 81920) for index in range(4)
    ]


def test_a_gpu_as_large_as_the_host_uses_unified_memory(path, lab):
    host_mib = PsutilHost(NodeSettings()).read().mem_total_mib
    lab.sees(AT + 1, host_mib, host_mib - 1)
    node = read_machine(str(path), Settings())
    assert [card.has_host_memory for card in node.gpus] == [True, False]


def test_the_machine_has_the_labels_and_resources_of_its_node(path, lab):
    settings = NodeSettings(name="n1", labels=("nvlink", "a100", "nvlink"), resources={"scratch": 2, "fpga": 1})
    node = read_machine(str(path), Settings(node=settings))
    assert node.labels == ("a100", "nvlink")
    assert node.resources == (("fpga", 1), ("scratch", 2))


def test_the_table_is_only_read(path, lab):
    lab.ran(0, 100.0)
    store = open_to_read(str(path))
    with pytest.raises(NotReady, match="cannot be written"):
        store.prune([1])
    store.close()


def test_an_unreadable_table_is_refused(path, tmp_path, monkeypatch):
    with pytest.raises(NotFound, match="there is no history"):
        open_to_read(str(path))
    other = tmp_path / "other.db"
    with sqlite3.connect(other) as db:
        db.execute("CREATE TABLE pets (name)")
    with pytest.raises(StoreBroken, match="is a database, but not gpusched's"):
        open_to_read(str(other))
    Lab(path).close()
    for version, error in ((3, NotReady), (99, StoreBroken)):
        with sqlite3.connect(path) as db:
            db.execute(f"PRAGMA user_version = {version}")
        with pytest.raises(error):
            open_to_read(str(path))
    monkeypatch.setattr(os, "access", lambda *words: False)
    with pytest.raises(Forbidden, match="is not readable by you"):
        open_to_read(str(path))


# --- the command --------------------------------------------------------------------------------------


CONFIG = '[default]\nqueue = "vision"\n[queue.vision]\n[queue.theory]\n'
PROMISED = CONFIG + "guaranteed_gpus = 2\n"


@pytest.fixture
def typed(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GPUSCHED_HOME", str(tmp_path / "home"))

    def run(*words: str):
        monkeypatch.setattr("sys.argv", ["gpusched", "simulate", *words])
        code = main()
        shown = capsys.readouterr()
        return code, shown.out, shown.err

    return run


@pytest.fixture
def busy(lab, tmp_path):
    """Four GPUs that vision keeps busy all day, and two short jobs of theory that come into it."""
    for hour in range(6):
        lab.ran(3600 * hour, 5 * 3600.0, gpus=2, user="ann", time_limit_s=6 * 3600)
    for hour in (2, 3):
        lab.ran(3600 * hour, 600.0, gpus=1, user="eva", queue="theory", time_limit_s=1200)
    (tmp_path / "home" / "config.toml").write_text(CONFIG)
    (tmp_path / "new.toml").write_text(PROMISED)
    return lab


def test_a_queue_gets_two_guaranteed_gpus(typed, busy):
    code, out, err = typed("--from-history", "--config", "new.toml", "--json")
    assert (code, err) == (0, "")
    made = json.loads(out)
    assert [one["policy"] for one in made["policies"]] == ["present", "default"]
    present, new = ({one["queue"]: one for one in made["by_queue"][name]} for name in ("present", "default"))
    assert present["theory"]["wait_s"] > 3600
    assert new["theory"]["wait_s"] == 0
    assert (present["vision"]["preempted"], present["vision"]["lost_gpu_s"]) == (0, 0)
    assert new["vision"]["preempted"] >= 1
    assert new["vision"]["lost_gpu_s"] > 0
    assert new["vision"]["completion_s"] > present["vision"]["completion_s"]


def test_each_queue_has_a_line_for_each_policy(typed, busy):
    code, out, err = typed("--from-history", "--config", "new.toml", "--policy", "default,present")
    assert code == 0
    below = out.split("\n\n")[1].splitlines()
    assert below[0].split() == "QUEUE POLICY JOBS WAIT P95 COMPLETION FAILED PREEMPTED LOST".split()
    assert [tuple(line.split()[:3]) for line in below[1:]] == [
        ("theory", "default", "2"),
        ("theory", "present", "2"),
        ("vision", "default", "6"),
        ("vision", "present", "6"),
    ]
    assert "the machine starts empty" in err


def test_the_settings_in_force_are_replayed_by_default(typed, busy):
    code, out, _ = typed("--from-history", "--json")
    assert code == 0
    made = json.loads(out)
    assert [one["policy"] for one in made["policies"]] == ["present"]
    assert made["policies"][0]["jobs"] == 8


def test_jobs_with_labels_and_resources_are_replayed(typed, lab, tmp_path):
    lab.ran(0, 100.0, request=request(gpus=1, constraint="nvlink", nodelist=("lab1",)))
    lab.ran(10, 100.0, request=request(gpus=1, resources=(("scratch", 1),), prefer="a100"))
    node = '[node]\nname = "lab1"\nlabels = ["nvlink", "a100"]\nresources = { scratch = 1 }\n'
    (tmp_path / "home" / "config.toml").write_text(node + CONFIG)
    # What one would change says nothing of the machine.
    (tmp_path / "new.toml").write_text(CONFIG)
    code, out, err = typed("--from-history", "--config", "new.toml", "--json")
    assert (code, err) == (0, "")
    made = json.loads(out)
    assert (made["dropped"], [one["jobs"] for one in made["policies"]]) == ({}, [2, 2])


def test_jobs_refused_by_one_policy_are_omitted_from_all(typed, busy, tmp_path):
    (tmp_path / "new.toml").write_text('[default]\nqueue = "vision"\n[queue.vision]\nmax_gpus_per_job = 1\n')
    code, out, err = typed("--from-history", "--config", "new.toml")
    assert code == 1
    assert "no job of the history can be replayed" in err
    assert "refused by the policy default, there is no queue 'theory': 2 (7, 8)" in err
    (tmp_path / "new.toml").write_text('[default]\nqueue = "vision"\n[queue.vision]\n')
    code, out, err = typed("--from-history", "--config", "new.toml", "--json")
    made = json.loads(out)
    assert [one["jobs"] for one in made["policies"]] == [6, 6]
    assert made["dropped"]["refused by the policy default, there is no queue 'theory'"]["count"] == 2


@pytest.mark.parametrize(
    "accounts",
    ['[account.vision]\nusers = ["bob"]\n', '[account.vision]\ngroups = ["no-such-group"]\n', "[account.vision]\n"],
    ids=["of another user by now", "of a group", "without members"],
)
def test_admitted_jobs_are_replayed_whatever_the_membership_now(typed, lab, tmp_path, accounts):
    for hour in range(3):
        lab.ran(3600 * hour, 600.0, user="ann", account="vision", time_limit_s=1200)
    lab.ran(0, 600.0, user="ann", account="gone", time_limit_s=1200)
    (tmp_path / "new.toml").write_text(accounts)
    code, out, _ = typed("--from-history", "--config", "new.toml", "--policy", "default", "--json")
    made = json.loads(out)
    assert (code, [one["jobs"] for one in made["policies"]]) == (0, [3])
    (why,) = made["dropped"]
    assert why.startswith("refused by the policy default, there is no account 'gone'")


# --- on the site's own accounts -----------------------------------------------------------------------


SITE = """
[node]
cpus = 8
[history]
keep_days = 0
[default]
queue = "vision"
[queue.vision]
[license]
matlab = 1
[qos.night]
[account.lab]
users = ["*"]
[account.vision]
users = ["*"]
gpu_hours = {hours}
budget_period = "{period}"
"""
POLICIES = ("present", "default", "fair", "throughput", "fcfs+easy", "sjf+sjbf/spread")


@pytest.fixture
def budgeted(lab, tmp_path):
    """Three jobs of an account with a budget, one with a licence and a QOS, all at once; each of 1 GPU-hour."""

    def configure(hours: float, period: str) -> Lab:
        (tmp_path / "home" / "config.toml").write_text(SITE.format(hours=hours, period=period))
        for user in ("ann", "eva", "ann"):
            lab.ran(0, 3600.0, user=user, account="vision", time_limit_s=3600)
        asks = request(gpus=1, licenses=(("matlab", 1),))
        lab.ran(0, 60.0, user="bob", account="lab", qos="night", request=asks, time_limit_s=3600)
        return lab

    return configure


@pytest.mark.parametrize("period", ["month", "quarter", "year", "total"])
def test_a_history_with_budgets_ends_with_its_last_job(typed, budgeted, period):
    budgeted(1000, period)
    code, out, err = typed("--from-history", "--policy", "present", "--json")
    assert (code, err) == (0, "")
    made = json.loads(out)
    assert (made["dropped"], made["policies"][0]["jobs"]) == ({}, 4)


def test_every_policy_is_compared_on_the_accounts_of_the_site(typed, budgeted):
    budgeted(1000, "month")
    code, out, err = typed("--from-history", "--policy", ",".join(POLICIES), "--json")
    assert (code, err) == (0, "")
    made = json.loads(out)
    assert made["dropped"] == {}
    assert [(one["policy"], one["jobs"]) for one in made["policies"]] == [(name, 4) for name in POLICIES]


def test_jobs_wait_for_the_month_in_which_there_is_a_budget_again(typed, budgeted):
    budgeted(2, "month")
    code, out, _ = typed("--from-history", "--policy", "present,fair", "--json")
    made = json.loads(out)
    assert (code, made["dropped"]) == (0, {})
    begins_at = period_at(AT, "month").until_at
    assert begins_at is not None
    for name in ("present", "fair"):
        (queue,) = made["by_queue"][name]
        # One of four.
        assert queue["wait_s"] * 4 == begins_at - AT


def test_jobs_that_a_spent_budget_never_lets_start_are_counted_and_named(typed, budgeted):
    budgeted(1, "total")
    code, out, _ = typed("--from-history", "--policy", "present,fcfs+easy", "--json")
    made = json.loads(out)
    assert (code, [one["jobs"] for one in made["policies"]]) == (0, [2, 2])
    ((why, jobs),) = made["dropped"].items()
    assert why.startswith("never starts, ")
    assert "vision" in why
    assert jobs["count"] == 2
    _, _, err = typed("--from-history")
    assert f"{why}: 2 (" in err


def test_a_budget_without_room_for_any_job_of_the_history_is_an_error(typed, lab, tmp_path):
    (tmp_path / "home" / "config.toml").write_text(SITE.format(hours=0.5, period="month"))
    lab.ran(0, 3600.0, user="ann", account="vision", time_limit_s=3600)
    code, out, err = typed("--from-history")
    assert (code, out) == (1, "")
    assert "no job of the history can be replayed (never starts, " in err


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("--from-history",), "there is no history"),
        (("--from-history", "--since", "soon"), "'soon'"),
        (("x.csv", "--from-history"), "both name jobs to replay"),
        (("x.csv", "--since", "3d"), "--since needs --from-history"),
        ((), "no jobs to replay"),
        (("--from-history", "--exact"), "--exact needs a trace"),
        (("--from-history", "--fail-rate", "1.5"), "--fail-rate 1.5 is not a fraction from 0 to below 1"),
        (("--from-history", "--fail-rate", "nan"), "--fail-rate nan is not a fraction from 0 to below 1"),
        (("x.csv", "--tick", "--retries", "-1"), "--retries -1 is negative"),
        (("x.csv", "--retries", "1"), "need --tick"),
        (("--from-history", "--config", "none.toml"), "there is no config file none.toml"),
        (("x.csv", "--config", "new.toml", "--policy", "fcfs"), "no policy uses new.toml"),
        (("x.csv", "--wait-bound", "soon"), "'soon' is not a time"),
    ],
)
def test_conflicting_words_are_refused(typed, tmp_path, words, text):
    (tmp_path / "new.toml").write_text("")
    code, out, err = typed(*words)
    assert code in (1, 2)
    assert out == ""
    error, hint = err.splitlines()
    assert text in error
    assert hint.startswith("gpusched: hint: ")


TRACE = "job_id,submit_s,duration_s,num_gpus,queue\na,0,500,2,vision\nb,10,50,1,theory\n"


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (PROMISED, "under the policy default runs can be preempted"),
        (CONFIG, "under the policy default queues (theory, vision) decide who may submit what"),
    ],
)
def test_the_fast_path_names_its_limits(typed, tmp_path, config, text):
    (tmp_path / "jobs.csv").write_text(TRACE)
    (tmp_path / "new.toml").write_text(config)
    words = ("jobs.csv", "--nodes", "1x2", "--config", "new.toml", "--policy", "default,fcfs+easy")
    code, _, err = typed(*words)
    assert code == 2
    assert text in err
    assert "hint: simulate the whole daemon: --tick" in err
    code, out, _ = typed(*words, "--tick")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()[1:3]] == ["default", "fcfs+easy"]


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("--nodes", "2x4"), "--tick simulates the daemon of one machine; the cluster has 2 nodes"),
        (("--nodes", "1x4", "--policy", "sjf_exact"), "sjf_exact knows every run time"),
    ],
)
def test_the_tick_names_its_limits(typed, tmp_path, words, text):
    (tmp_path / "jobs.csv").write_text(TRACE)
    code, _, err = typed("jobs.csv", "--tick", *words)
    assert code == 2
    assert text in err


def test_trace_jobs_without_queues_go_to_the_configured_queue(typed, tmp_path):
    (tmp_path / "jobs.csv").write_text("job_id,submit_s,duration_s,num_gpus\na,0,500,2\n")
    (tmp_path / "new.toml").write_text(CONFIG)
    code, out, _ = typed(
        "jobs.csv", "--nodes", "1x2", "--tick", "--config", "new.toml", "--policy", "default", "--json"
    )
    assert code == 0
    assert json.loads(out)["policies"][0]["jobs"] == 1


def test_failures_by_seed_are_reported_by_queue(typed, tmp_path):
    (tmp_path / "jobs.csv").write_text(TRACE + "".join(f"j{n},{n},30,1,vision\n" for n in range(20, 60)))
    words = ("jobs.csv", "--nodes", "1x4", "--tick", "--fail-rate", "0.5", "--retries", "1", "--json", "--seed")
    first, again, other = (json.loads(typed(*words, seed)[1])["by_queue"] for seed in ("1", "1", "2"))
    assert first == again
    assert first != other
    assert sum(one["failed"] for one in first["fcfs+easy"]) > 10


def test_every_ended_state_has_a_word_in_the_simulation(path, lab):
    lab.ran(0, 10.0, ends=(JobState.OUT_OF_MEMORY.value,))
    (job,) = read_history(str(path)).jobs
    assert job.attempts == ((10, "out_of_memory"),)
