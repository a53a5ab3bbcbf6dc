"""What a job asks of nodes and on what terms, as typed; and the tables of priorities, usage, accounts and queues."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request
from answering import answering
from lab import ANN, BOB, ROOT, Lab
from shell import Shell, compare, stopped
from support import wait_until

from gpusched.addons.simulate.engine import SimulatedOutcome
from gpusched.api import visibility
from gpusched.api.handlers import cluster, jobs, queues
from gpusched.api.handlers.reservations import listing
from gpusched.api.service import SERVICE, ApiService
from gpusched.cli import accounts, forecast, gctl, ghist, ginfo, gq
from gpusched.daemon.facade import DaemonFacade
from gpusched.model.planner_settings import PrioritySettings
from gpusched.model.queue_settings import AccountSettings, QosSettings, QueueSettings
from gpusched.ports.tables import FENCES
from gpusched.testing import request

QUEUES = {
    "lab": QueueSettings("lab", max_gpus=8),
    "vision": QueueSettings("vision", parent="lab", guaranteed_gpus=3, guaranteed_cpus=6),
    "nlp": QueueSettings("nlp", parent="lab", guaranteed_gpus=1, weight=2.0),
    "rest": QueueSettings("rest"),
}
ACCOUNTS = {
    "group": AccountSettings("group", shares=3),
    "inner": AccountSettings("inner", parent="group", users={"ann": 2.0}),
    "other": AccountSettings("other", users={"*": 1.0}),
}
QOS = {"high": QosSettings("high", tier=5, factor=1.0)}
ROUTES = {
    "/v1/jobs": jobs.listing,
    "/v1/priorities": queues.priorities,
    "/v1/usage": queues.usage,
    "/v1/budgets": queues.budgets,
    "/v1/accounts": queues.accounts,
    "/v1/queues": queues.queues,
    "/v1/cluster": cluster.cluster,
    "/v1/reservations": listing,
}


class Direct:
    """A client that asks the handlers themselves, of a scheduler turned by hand."""

    def __init__(self, lab: Lab) -> None:
        self.app = web.Application()
        self.app[SERVICE] = ApiService(DaemonFacade(lab.ticker))

    def call(self, method: str, path: str, body: object = None) -> dict[str, Any]:
        answer = asyncio.run(answering(ROUTES[path.partition("?")[0]])(make_mocked_request(method, path, app=self.app)))
        assert isinstance(answer, web.Response)
        return dict(json.loads(answer.text or ""))


Type = Callable[..., str]


def typing(lab: Lab, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Type:
    """Types commands at a lab."""
    client = Direct(lab)

    @contextmanager
    def connect() -> Any:
        yield client

    for module in (gq, accounts, gctl, ghist, ginfo):
        monkeypatch.setattr(module, "connect", connect)
    monkeypatch.setattr(visibility, "caller_of", lambda request: ANN)
    monkeypatch.setattr(cluster, "user_name", lambda uid: {ANN.uid: "ann", BOB.uid: "bob"}[uid])
    commands = {"gq": gq.body, "gctl": gctl.body, "ghist": ghist.body, "ginfo": ginfo.body}

    def do(line: str) -> str:
        command, *words = line.split()
        capsys.readouterr()
        assert commands[command](words) == 0
        captured = capsys.readouterr()
        return captured.out + "".join(f"[stderr] {text}\n" for text in captured.err.splitlines())

    return do


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Type:
    """Types a command at a lab where queue nlp has borrowed from vision and three jobs wait."""
    lab = Lab(
        4,
        outcome=SimulatedOutcome(runs_s=36000),
        queue=QUEUES,
        account=ACCOUNTS,
        qos=QOS,
        priority=PrioritySettings(order="multifactor", weight_size=100.0, weight_deadline=100.0),
    )
    lab.submit(request=request(3, cpus=1.5, mem_mib=4096), queue="nlp", account="inner")
    lab.tick(3600)
    lab.ask(lab.submission(BOB, request=request(1), queue="rest", account="other"))
    lab.submit(request=request(4), queue="vision", account="inner", nice=250)
    lab.submit(request=request(1), queue="rest", account="other", qos="high")
    lab.submit(request=request(1), queue="nlp", account="other", time_limit_s=600, deadline_at=lab.clock.now() + 9000)
    lab.tick(1800)
    return typing(lab, monkeypatch, capsys)


def test_response_ratio_positions_show_their_parts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ann has used much: Bob's jobs go first, and room is reserved for the one that has waited long enough."""
    monkeypatch.setattr(forecast, "instant", lambda at, now: f"{round((at - lab.clock.now()) / 3600)} h from now")
    lab = Lab(4, outcome=SimulatedOutcome(runs_s=360_000), priority=PrioritySettings(), qos=QOS)
    lab.submit(request=request(4))
    lab.tick(3600)
    monkeypatch.setattr(gq, "time", SimpleNamespace(time=lab.clock.now))
    lab.ask(lab.submission(BOB, request=request(4), time_limit_s=1800))
    lab.tick(7200)
    lab.submit(request=request(1), time_limit_s=36_000)
    lab.submit(request=request(1), time_limit_s=3600, nice=1000)
    lab.ask(lab.submission(BOB, request=request(1), time_limit_s=36_000))
    lab.submit(request=request(1), hold=True)
    lab.tick(3600)
    do = typing(lab, monkeypatch, capsys)
    seen_by_ann = {row["id"]: row["response"] for row in json.loads(do("gq --priority --json"))["priorities"]}
    assert seen_by_ann["2"] is None, "what others have used is not for everybody"
    monkeypatch.setattr(visibility, "caller_of", lambda request: ROOT)
    shown = [
        f"$ {line}\n{do(line)}" for line in ("gq --priority", "gq --priority --noheader 3", "gq --priority --quiet")
    ]
    compare("priorities-response.txt", "\n".join(shown))
    rows = json.loads(do("gq --priority --json"))["priorities"]
    found = {row["id"]: row["response"] for row in rows}
    assert found["6"] is None
    assert found["2"]["is_reserved"]
    assert found["2"]["fence_at"] == lab.scheduler.state.rows[FENCES][2]
    assert not found["3"]["is_reserved"]
    assert found["3"]["fence_at"] is None
    assert found["5"]["turn"] == 1 < found["3"]["turn"]
    # Of whole nodes the length counts a little less.
    assert found["2"]["ratio"] > (1 + found["2"]["waited_s"]) / 1800
    assert found["5"]["ratio"] == pytest.approx((1 + found["5"]["waited_s"]) / 36_000)
    assert found["4"]["urgency"] == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("name", "lines"),
    [
        (
            "priorities",
            ["gq --priority", "gq --priority --noheader 4", "gq --priority --quiet", "gq --priority --json 3"],
        ),
        (
            "usage",
            [
                "ghist --usage --since @0",
                "ghist --by account --since @0",
                "ghist --by queue --since @0 --csv",
                "ghist --usage --since @0 --quiet",
                "ghist --usage --since @0 --json -u bob",
            ],
        ),
        ("accounts", ["gctl account", "gctl account group", "gctl account --quiet", "gctl account other --json"]),
        ("queues", ["gctl queue", "gctl queue vision", "gctl queue --quiet", "gctl queue vision --json"]),
        ("ginfo-queues", ["ginfo"]),
    ],
)
def test_tables_of_standings_are_printed(typed: Type, name: str, lines: list[str]) -> None:
    compare(f"{name}.txt", "\n".join(f"$ {line}\n{typed(line)}" for line in lines))


def test_json_of_queues_has_the_keys_that_scripts_use(typed: Type) -> None:
    for line in ("gctl queue --json", "ginfo --json"):
        for row in json.loads(typed(line))["queues"]:
            keys = (
                "name",
                "guaranteed_gpus",
                "max_gpus",
                "used_gpus",
                "borrowed_gpus",
                "lent_gpus",
                "pending",
                "running",
            )
            assert set(keys) <= set(row)


# --- typed at a real scheduler ------------------------------------------------------------------


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    """A scheduler whose other nodes have never answered."""
    root = tmp_path_factory.mktemp("several")
    (root / "home").mkdir()
    nodes = '[cluster]\nnodes = ["lab3", "lab7", "lab8", "lab9"]\nconnect = "false {node}"\n'
    (root / "home" / "config.toml").write_text(f'[node]\nname = "lab1"\ncpus = 64\nmem_mib = 65536\n{nodes}')
    shell = Shell(root / "home", root, GPUSCHED_FAKE_GPUS="2xA100:80GiB+1xT4:16GiB")
    yield shell
    stopped(shell)


@pytest.fixture
def sh(several: Shell, tmp_path: Path) -> Shell:
    """This scheduler, from a folder of the test's own."""
    shell = Shell(several.home, tmp_path)
    shell.env = dict(several.env)
    return shell


@pytest.fixture
def asks(sh: Shell) -> Callable[..., dict[str, Any]]:
    """Submits held with these options and gives the job's JSON."""

    def submit(*words: str) -> dict[str, Any]:
        job_id = sh.submit("-H", *words, "--", "true")
        (job,) = json.loads(sh.ok("gq", "--json", "-j", job_id))["jobs"]
        return dict(job)

    return submit


def test_every_request_is_in_the_json(asks: Callable[..., dict[str, Any]]) -> None:
    job = asks("-w", "lab[1-1]", "-x", "lab3", "--exclusive", "-g", "2", "--gpus-linked", "--deadline", "now+3h")
    assert (job["nodelist"], job["exclude"]) == (["lab1"], ["lab3"])
    assert (job["exclusive"], job["gpus_linked"], job["nodes"], job["gpus_per_node"]) == (True, True, 1, 2)
    assert job["deadline_at"] - job["submit_at"] == pytest.approx(3 * 3600, abs=60)
    assert (job["qos"], job["reservation"], job["constraint"], job["licenses"], job["resources"]) == (
        *(None, None, None),
        *({}, {}),
    )


def test_the_command_line_overrides_the_requests_of_a_script(sh: Shell) -> None:
    (sh.work / "x.sh").write_text("#!/bin/sh\n#SBATCH --gres=gpu:a100:2\n#SBATCH --exclusive\n#SBATCH -x lab9\ntrue\n")
    for words, asked, excluded in (((), "a100:2", ["lab9"]), (("-g", "1", "-x", "lab8"), "1", ["lab8"])):
        job_id = sh.ok("gsub", "--parsable", "-H", *words, "x.sh").strip()
        (job,) = json.loads(sh.ok("gq", "--json", "-j", job_id))["jobs"]
        assert (job["gpu_request"], job["exclude"], job["exclusive"]) == (asked, excluded, True)


def test_an_update_changes_requests_and_describes_them(sh: Shell) -> None:
    job_id = sh.submit("-H", "-g", "2", "-x", "lab9", "--exclusive", "--", "true")
    sh.ok("gctl", "update", job_id, "exclude=lab[7-8]", "exclusive=no", "gpus=1", "deadline=now+1d", "nodelist=")
    (job,) = json.loads(sh.ok("gshow", "--json", job_id))["jobs"]
    assert (job["exclude"], job["exclusive"], job["gpu_request"]) == (["lab7", "lab8"], False, "1")
    assert "exclude=lab7,lab8, " in job["events"][-1]["text"]
    assert "is_exclusive=no, nodelist=none" in job["events"][-1]["text"]
    misspelt = sh.type("gctl", "update", job_id, "exclude=lab7,lb8")
    assert (misspelt.code, misspelt.out, misspelt.err) == (
        1,
        "",
        "gctl: error: asked to leave out node lb8; the nodes here are lab1, lab3, lab7, lab8 and lab9\n"
        "gctl: hint: see the nodes with: ginfo\n",
    )
    text = sh.ok("gshow", job_id)
    assert "Where:      not on lab7,lab8\n" in text
    assert "Deadline:   " in text


@pytest.mark.parametrize(
    ("line", "says", "hint"),
    [
        ("-N 4 -g 3", "3 GPUs cannot be spread evenly over 4 nodes; the nearest that can: 4", "--gpus-per-node"),
        ("-N 2 -g 0.5", "a share of one card, 0.5, cannot be spread over 2 nodes", "--gpus-per-node 0.5"),
        ("-g 4 --gpus-per-node 3", "4 GPUs in all and 3 on one node contradict each other", "-g for all nodes"),
        ("-w lab1 -x lab1", "every requested node is also excluded", "gsub --help"),
        ("--gpus-linked", "linked GPUs are requested, but no GPU", "gsub --help"),
        ("-C a&&b", "constraint", "--constraint"),
        ("-L a|b:2", "'a|b' is not a name for licenses", "-L matlab:2,ansys"),
        ("--reservation course", "'course'", "gctl reserve"),
        ("--deadline now+1m -t 1h", "the job may run 1:00:00, but its deadline is", "-t "),
    ],
)
def test_impossible_requests_are_refused_in_a_sentence(sh: Shell, line: str, says: str, hint: str) -> None:
    done = sh.type("gsub", *line.split(), "--", "true")
    assert done.code in (1, 2)
    first, second = done.err.splitlines()
    assert says in first
    assert hint in second


def test_usage_counts_running_and_ended_jobs(own: Shell) -> None:
    own.ok("gsub", "-W", "--quiet", "-g", "1", "-q", "a", "--", "sleep", "0.3")
    own.submit("-g", "0.5", "-q", "b", "--", "sleep", "30")

    def sums() -> dict[str, dict[str, Any]]:
        return {row["queue"]: row for row in json.loads(own.ok("ghist", "--by", "queue", "--json"))["usage"]}

    wait_until(lambda: "b" in sums(), what="job 2 to run")
    found = sums()
    assert found["a"]["gpu_hours"] * 3600 == pytest.approx(found["a"]["core_hours"] * 3600)
    assert 0.25 < found["a"]["gpu_hours"] * 3600 < 60
    assert (found["b"]["jobs"], found["b"]["runs"]) == (1, 1)
    assert found["b"]["gpu_hours"] == pytest.approx(found["b"]["core_hours"] / 2)
    refused = own.type("ghist", "--usage", "--efficiency")
    assert (refused.code, refused.out) == (2, "")


CONFIG = """
[node]
name = "lab1"
labels = ["a100"]
resources = { scratch = 3 }

[license]
matlab = 1

[queue.vision]
guaranteed_gpus = 2

[queue.nlp]

[qos.normal]

[qos.high]
tier = 1

[default]
queue = "vision"
qos = "normal"
"""


def test_queues_qos_labels_licenses_and_resources_come_from_the_config_file(own: Shell) -> None:
    (own.home / "config.toml").write_text(CONFIG)
    own.submit("-q", "nlp", "-g", "1", "-C", "a100", "-L", "matlab", "--res", "scratch=2", "--", "sleep", "60")
    wait_until(lambda: own.ok("gq", "--quiet", "-s", "R").split() == ["1"], what="job 1 to run")
    own.submit("-L", "matlab", "--", "sleep", "60")
    own.submit("--res", "scratch=2", "--qos", "high", "--", "sleep", "60")
    assert own.ok("gq", "-o", "%i %q %W %f %P", "--noheader").splitlines() == [
        "1 normal matlab:1 a100 nlp",
        "2 normal matlab:1 (null) vision",
        "3 high (null) (null) vision",
    ]
    assert own.ok("gq", "--quiet", "-s", "PD").split() == ["2", "3"]
    rows = json.loads(own.ok("gq", "--priority", "--json"))["priorities"]
    assert [(row["id"], row["tier"]) for row in rows] == [("3", 1), ("2", 0)]
    assert "vision has lent 1 GPU to nlp\n" in own.ok("gctl", "queue")
    assert "vision has lent 1 GPU to nlp\n" in own.ok("ginfo")
    for words in (["-C", "h100"], ["-L", "matlab:2"], ["-L", "other"], ["--res", "scratch=4"], ["-w", "lab2"], ["-N2"]):
        assert own.type("gsub", *words, "--", "true").code == 1, words
