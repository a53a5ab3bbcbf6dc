"""Settings that are valid and change nothing: each is named with what it needs, and none where it has that."""

from __future__ import annotations

from pathlib import Path

import pytest
from lab import Lab

from gpusched.addons.simulate.engine import SimulatedOutcome
from gpusched.config import SETTINGS, load_settings
from gpusched.config.without_effect import RULES, without_effect
from gpusched.daemon.facade import DaemonFacade
from gpusched.model.job import Request
from gpusched.model.queue_settings import QosSettings
from gpusched.model.settings import Settings
from gpusched.scheduler.who_preempts import why_it_preempts_nothing
from gpusched.testing import request

FOREVER = SimulatedOutcome(runs_s=1000)
NO_PREEMPTION = "no QOS lists another in preempts, and no queue has a guarantee to reclaim"


def found(tmp_path: Path, text: str) -> list[tuple[str, str, str]]:
    path = tmp_path / "config.toml"
    path.write_text(text)
    return list(without_effect(load_settings(str(path), {})))


WITHOUT = {
    "preempt mode, and nobody may preempt": (
        '[preempt]\nmode = "requeue"',
        "[preempt] mode has no effect: " + NO_PREEMPTION,
        "[queue.default]\nguaranteed_gpus = 1",
    ),
    "preempt mode and tiers without preempts": (
        '[preempt]\nmode = "requeue"\n[qos.low]\n[qos.high]\ntier = 1',
        "the tier of QOS high only orders jobs, and preempts none: no QOS lists another in preempts",
        'preempts = ["low"]',
    ),
    "tiers without preempts": (
        "[qos.low]\n[qos.high]\ntier = 1",
        "the tier of QOS high only orders jobs, and preempts none: no QOS lists another in preempts",
        "preempts = []",
    ),
    "preempt times, and no preemption": (
        '[preempt]\nmode = "off"\nmin_run_s = 60\nreclaim = false',
        '[preempt] min_run_s and reclaim have no effect: mode = "off" preempts no run',
        None,
    ),
    "QOS times, and no preemption": (
        "[qos.low]\nmin_run_s = 60",
        "min_run_s of QOS low has no effect: no run is preempted",
        '[qos.high]\ntier = 1\npreempts = ["low"]',
    ),
    "then of idle GPUs, which are not watched": (
        '[idle]\nafter_s = 0\nthen = "requeue"',
        "[idle] then has no effect: after_s = 0 marks no run as idle",
        None,
    ),
    "times of then, which is off": (
        "[idle]\nthen_after_s = 60\nnotice_s = 5",
        '[idle] then_after_s and notice_s have no effect: then = "off" ends no idle run',
        'then = "cancel"',
    ),
    "time before an idle job is lowered by nothing": (
        "[idle]\nnice = 0\nlower_after_s = 60",
        "[idle] lower_after_s has no effect: nice = 0 lowers no job",
        None,
    ),
    "grace of an overuse that ends nothing": (
        "[gpu]\nvram_over_grace_s = 5",
        '[gpu] vram_over_grace_s has no effect: vram_over = "warn" and astray = "tell" end no run',
        'astray = "end"',
    ),
    "variable of static devices": (
        '[gpu]\nstatic_variable = "NPU"',
        "[gpu] static_variable has no effect: no static devices are declared",
        'static = "2xnpu:16GiB"',
    ),
    "static devices beside NVML": (
        '[gpu]\nsource = "nvml"\nstatic = "2xnpu:16GiB"',
        '[gpu] static has no effect: source = "nvml" reads other devices',
        None,
    ),
    "simulated GPUs beside NVML": (
        '[gpu]\nsource = "nvml"\nfake = "2x24GiB"',
        '[gpu] fake has no effect: source = "nvml" reads other devices',
        None,
    ),
    "exempt users of no alert": (
        '[foreign]\nexempt_users = ["ann"]',
        "[foreign] exempt_users has no effect: message = [] alerts no owner",
        'message = ["mail"]',
    ),
    "grace of foreign processes that are not killed": (
        '[foreign]\nmessage = ["mail"]\nkill_grace_s = 5',
        "[foreign] kill_grace_s has no effect: no process is killed without kill_after_s",
        "kill_after_s = 3600",
    ),
    "window of early failures": (
        "[fault]\nearly_users = 0\nearly_window_s = 60",
        "[fault] early_window_s has no effect: early_users = 0 makes no GPU suspect for early failures",
        None,
    ),
    "time of no prolog": ("[prolog]\ntimeout_s = 5", "[prolog] timeout_s has no effect: the site has no prolog", None),
    "time of no epilog": ("[epilog]\ntimeout_s = 5", "[epilog] timeout_s has no effect: the site has no epilog", None),
    "overhead of no price": (
        "[energy]\npue = 1.4",
        "[energy] pue has no effect: no prices or emissions are known",
        "g_per_kwh = 300",
    ),
    "marks of no budget": (
        "[budget]\nalert_at = [50]",
        "[budget] alert_at has no effect: no account has a budget",
        '[account.vision]\nusers = ["ann"]\ngpu_hours = 100',
    ),
    "when a budget is spent that there is not": (
        '[account.vision]\nusers = ["ann"]\nwhen_spent = "filler"',
        "when_spent of account vision has no effect: the account has no budget of its own",
        "gpu_hours = 100",
    ),
    "bursts of no queue": (
        "[burst]\nmax_jobs = 5",
        "[burst] max_jobs has no effect: no queue has burst_after_s",
        '[handover]\ncommands = "/usr/bin"\n[queue.default]\nburst_after_s = 60',
    ),
    "hand-over to nothing": (
        "[handover]\npoll_interval_s = 5",
        "[handover] poll_interval_s has no effect: without commands no job is handed over",
        'commands = "/usr/bin"',
    ),
    "partition of no Slurm": (
        '[queue.default]\nslurm_partition = "gpu"',
        "slurm_partition of queue default has no effect: without [handover] commands no job is handed over",
        '[handover]\ncommands = "/usr/bin"',
    ),
    "protection of what nobody reclaims": (
        "[queue.default]\npreemptible = false",
        "preemptible = false of queue default has no effect: no queue reclaims what it has lent",
        "[queue.b]\nguaranteed_gpus = 1",
    ),
    "connection to no node": (
        '[cluster]\nconnect = "ssh {node}"',
        "[cluster] connect has no effect: no other nodes are named",
        'nodes = ["lab2"]',
    ),
    "images that are refused": (
        '[containers]\nruntime = "none"\nallowed = ["nvcr.io"]',
        '[containers] allowed has no effect: runtime = "none" refuses all images',
        None,
    ),
    "limits that are not enforced": (
        "[isolation]\nenforce = false\nswap = true",
        "[isolation] swap has no effect: enforce = false enforces no limit",
        None,
    ),
    "header of no proxy": (
        '[web]\nuser_header = "X-Remote-User"',
        "[web] user_header has no effect: without proxy_users no proxy may name a user",
        'proxy_users = ["www-data"]',
    ),
    "proxy without a header": (
        '[web]\nproxy_users = ["www-data"]',
        "[web] proxy_users has no effect: without user_header no proxy names a user",
        'user_header = "X-Remote-User"',
    ),
    "weights of another order": (
        "[priority]\nweight_age = 5",
        '[priority] weight_age has no effect: order = "response_ratio" does not weigh it',
        'order = "multifactor"',
    ),
    "weights that any weighing order uses": (
        '[priority]\norder = "fifo"\nweight_qos = 5\nweight_size = 7',
        '[priority] weight_qos has no effect: order = "fifo" does not weigh it',
        '[queue.default]\norder = "response_ratio"',
    ),
    "factor that is not weighed": (
        '[priority]\norder = "sjf"\n[qos.a]\nfactor = 0.5',
        'factor of QOS a has no effect: order = "sjf" does not weigh it',
        '[queue.default]\norder = "multifactor"',
    ),
    "sizes of no weight": (
        '[priority]\norder = "multifactor"\nfavor_small = true',
        "[priority] favor_small has no effect: weight_size = 0 counts no size",
        None,
    ),
    "patience of another order": (
        '[priority]\norder = "fifo"\nreserve_after_s = 60',
        '[priority] reserve_after_s has no effect: order = "fifo" does not use it',
        None,
    ),
}


@pytest.mark.parametrize(("text", "sentence", "needed"), WITHOUT.values(), ids=WITHOUT)
def test_a_setting_without_effect_is_named_until_it_has_what_it_needs(
    tmp_path: Path, text: str, sentence: str, needed: str | None
) -> None:
    told = found(tmp_path, text)
    assert sentence in [text for _, text, _ in told]
    assert all(remedy for *_, remedy in told)
    if needed is not None:
        # In the last section of the text, or in one of its own.
        assert sentence not in [text for _, text, _ in found(tmp_path, f"{text}\n{needed}")]


def test_defaults_have_an_effect_also_where_a_file_lists_them(tmp_path: Path) -> None:
    assert found(tmp_path, "") == []
    listed: dict[str, list[str]] = {}
    for rule in RULES:
        for key in rule.keys:
            default = SETTINGS[f"{rule.section}.{key}"].default
            if isinstance(default, (bool, int, float, str)) and rule.section not in ("preempt", "priority"):
                shown = str(default).lower() if isinstance(default, bool) else repr(default)
                listed.setdefault(rule.section, []).append(f"{key} = {shown}")
    text = "\n".join(f"[{section}]\n" + "\n".join(dict.fromkeys(lines)) for section, lines in listed.items())
    assert found(tmp_path, text) == []


def test_what_a_preset_sets_is_not_the_files(tmp_path: Path) -> None:
    for preset in ("fair", "throughput", "fifo", "slurm", "auto"):
        assert found(tmp_path, f'[priority]\npreset = "{preset}"') == []


def test_preemption_that_somebody_may_use_is_not_named(tmp_path: Path) -> None:
    for text in (
        '[preempt]\nmode = "suspend"\n[qos.low]\n[qos.high]\ntier = 1\npreempts = ["low"]',
        '[preempt]\nmode = "off"\n[qos.low]\n[qos.high]\ntier = 1',
        "[preempt]\nmin_run_s = 5\n[queue.default]\ncells = ['4']\nguaranteed_gpus = 4",
        '[preempt]\nmode = "requeue"\n[account.a]\nusers = ["ann"]\ngpu_hours = 5\nwhen_spent = "filler"',
    ):
        assert found(tmp_path, text) == []


# --- why a job preempts nothing ----------------------------------------------------------------------------


def qos(*found: QosSettings, mode: str = "requeue") -> Settings:
    made = Settings(qos={one.name: one for one in found})
    return made if mode == "requeue" else Settings(qos=made.qos, preempt=type(made.preempt)(mode=mode))


LOW, HIGH = QosSettings("low"), QosSettings("high", tier=1)
WHY = {
    "no list": (
        qos(LOW, HIGH),
        ["low", "low"],
        "its QOS high goes before jobs of QOS low, and preempts none of them: "
        'an administrator can set preempts = ["low"] in [qos.high]',
    ),
    "a list without it": (
        qos(LOW, QosSettings("mid"), QosSettings("high", tier=1, preempts=("mid",))),
        ["low"],
        "its QOS high goes before jobs of QOS low, and preempts none of them: "
        'an administrator can set preempts = ["mid", "low"] in [qos.high]',
    ),
    "one of two": (
        qos(LOW, QosSettings("mid"), QosSettings("high", tier=1, preempts=("mid",))),
        ["low", "mid"],
        None,
    ),
    "a job without a QOS": (
        qos(HIGH),
        [""],
        "its QOS high goes before jobs without a QOS, and preempts none of them: "
        'a job without a QOS cannot be preempted; [default] qos = "NAME" gives new jobs one',
    ),
    "no preemption": (
        qos(LOW, HIGH, mode="off"),
        ["low"],
        'its QOS high goes before jobs of QOS low, and preempts none of them: [preempt] mode = "off"',
    ),
    "a protected QOS": (
        qos(QosSettings("low", preemptible=False), QosSettings("high", tier=1, preempts=("low",))),
        ["low"],
        "its QOS high goes before jobs of QOS low, and preempts none of them: [qos.low] has preemptible = false",
    ),
    "it may": (qos(LOW, QosSettings("high", tier=1, preempts=("low",))), ["low"], None),
    "its own tier": (qos(LOW, HIGH), ["high"], None),
    "nothing runs": (qos(LOW, HIGH), [], None),
}


@pytest.mark.parametrize(("settings", "running", "sentence"), WHY.values(), ids=WHY)
def test_a_job_whose_qos_goes_first_says_why_it_preempts_nothing(
    settings: Settings, running: list[str], sentence: str | None
) -> None:
    assert why_it_preempts_nothing("high", running, settings) == sentence


@pytest.mark.parametrize(
    ("held", "wanted", "is_told"),
    [
        (request(1), request(1), True),
        (request(0, cpus=2), request(1, cpus=2), True),
        # It does not hold what is missing.
        (request(0, cpus=1), request(2), False),
    ],
)
def test_why_names_only_jobs_that_hold_what_is_missing(held: Request, wanted: Request, is_told: bool) -> None:
    one = Lab(
        gpus=2 if wanted.gpus > 1 else 1,
        cpus=4 if wanted.gpus > 1 else 2,
        qos={"low": LOW, "high": HIGH},
        outcome=FOREVER,
    )
    one.submit(qos="low", request=held)
    if wanted.gpus > 1:
        one.submit(qos="high", request=request(1))
    one.tick()
    waits = one.submit(qos="high", request=wanted)
    one.tick()
    told = DaemonFacade(one.ticker).why_it_preempts_nothing(one.job(waits))
    assert (told is not None and 'preempts = ["low"]' in told) is is_told
