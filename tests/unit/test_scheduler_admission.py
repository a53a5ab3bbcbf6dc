"""What queues and QOS refuse at submission, and in which words."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpusched.model.cluster import JobTerms
from gpusched.model.job import JobSpec
from gpusched.model.queue_settings import AccountSettings, QosSettings, QueueSettings
from gpusched.model.settings import DefaultSettings, Settings
from gpusched.model.value import replace
from gpusched.scheduler.admission import Tally, time_limit, why_refused
from gpusched.scheduler.cluster_state import ClusterLayout
from gpusched.scheduler.quota import Quotas
from gpusched.scheduler.usage import demand
from gpusched.testing import node, request, spec

GIB = 1024
HOUR = 3600
DAY = 24 * HOUR


def queue(name: str, parent: str | None = None, **parts: object) -> QueueSettings:
    return replace(QueueSettings(name, parent=parent), **parts)


def account(name: str, *users: str, parent: str | None = None) -> AccountSettings:
    return AccountSettings(name, parent=parent, users=dict.fromkeys(users, 1.0))


def settings_of(queues=(), qos=(), accounts=(), **default) -> Settings:
    return Settings(
        queue={one.name: one for one in queues},
        qos={one.name: one for one in qos},
        account={one.name: one for one in accounts},
        default=DefaultSettings(**default),
    )


def asks(gpus: int = 0, queue: str = "vision", account: str = "", qos: str = "", limit_s=None, **parts) -> JobSpec:
    return spec(request=request(gpus, **parts), queue=queue, account=account, qos=qos, time_limit_s=limit_s)


def refused(asked: JobSpec, settings: Settings, tally: Tally | None = None) -> tuple[str, str] | None:
    found = why_refused(asked, "ann", settings, Tally() if tally is None else tally)
    return None if found is None else (found.text, found.hint)


VISION = queue("vision")
LAB = (queue("lab"), queue("vision", "lab"), queue("speech", "lab"))
LABS = (account("science"), account("physics", "ann", parent="science"), account("chem", "bob"))
DAYTIME, NIGHT = QosSettings("day"), QosSettings("night")

ADMITTED = {
    "anything while nothing is configured": (asks(99, "any", "whatever", limit_s=DAY), settings_of()),
    "a queue that there is": (asks(), settings_of([VISION])),
    "a leaf of the tree": (asks(), settings_of(LAB)),
    "a QOS that there is": (asks(qos="night"), settings_of(qos=[DAYTIME, NIGHT])),
    "no QOS though there are some": (asks(), settings_of(qos=[NIGHT])),
    "normal while no QOS is configured": (asks(qos="normal"), settings_of()),
    "normal though others are configured": (asks(qos="normal"), settings_of(qos=[NIGHT])),
    "a user whom the queue names": (asks(), settings_of([replace(VISION, users=("bob", "ann"))])),
    "an account that the queue names": (
        asks(account="chem"),
        settings_of([replace(VISION, users=("bob",), accounts=("chem",))]),
    ),
    "an account below one that the queue names": (
        asks(account="physics"),
        settings_of([replace(VISION, accounts=("science",))], accounts=LABS),
    ),
    "a user whom the queue names below one that does not": (
        asks(),
        settings_of([queue("lab", users=("bob",)), queue("vision", "lab", users=("ann",))]),
    ),
    "a user whom the QOS names": (asks(qos="night"), settings_of(qos=[replace(NIGHT, users=("ann",))])),
    "an account that the QOS names": (
        asks(qos="night", account="physics"),
        settings_of(qos=[replace(NIGHT, accounts=("physics",))], accounts=LABS),
    ),
    "as much as a job may": (asks(2), settings_of([replace(VISION, max_gpus_per_job=2.0)])),
    "a part of a card where a job may have that": (
        asks(1, gpu_fraction=0.5),
        settings_of([replace(VISION, max_gpus_per_job=0.5)]),
    ),
    "a slice by memory, whatever part of a card it will be": (
        asks(1, vram_mib=GIB),
        settings_of([replace(VISION, max_gpus_per_job=0.25)]),
    ),
    "no GPU where none may be held": (asks(), settings_of([replace(VISION, max_gpus=0.0)])),
    "as much as the queue may hold": (
        asks(4, cpus=8, mem_mib=100),
        settings_of([replace(VISION, max_gpus=4.0, max_cpus=8.0, max_mem_mib=100)]),
    ),
    "as long as it may": (asks(limit_s=HOUR), settings_of([replace(VISION, max_time_s=HOUR)])),
    "no time limit: it gets the longest": (asks(), settings_of([replace(VISION, max_time_s=HOUR)])),
}


@pytest.mark.parametrize(("asked", "settings"), ADMITTED.values(), ids=ADMITTED)
def test_a_submission_is_admitted(asked, settings):
    assert refused(asked, settings) is None


REFUSED = {
    "an unknown queue": (
        asks(queue="default"),
        settings_of([VISION, queue("nlp")]),
        "there is no queue 'default'",
        "name one of them: -q nlp, -q vision",
    ),
    "a misspelt queue": (
        asks(queue="vison"),
        settings_of([VISION, queue("nlp")]),
        "there is no queue 'vison'",
        "did you mean -q vision?",
    ),
    "a queue name that would harm a terminal": (
        asks(queue="\x1b[2J"),
        settings_of([VISION]),
        "there is no queue '\\x1b[2J'",
        "name it: -q vision",
    ),
    "more queues than one reads": (
        asks(queue="zzz"),
        settings_of([queue(f"q{number}") for number in range(10)]),
        "there is no queue 'zzz'",
        "name one of them: -q q0, -q q1, -q q2, -q q3, -q q4, -q q5, -q q6, -q q7 and 2 more",
    ),
    "as many queues as one reads": (
        asks(queue="zzz"),
        settings_of([queue(f"q{number}") for number in range(8)]),
        "there is no queue 'zzz'",
        "name one of them: -q q0, -q q1, -q q2, -q q3, -q q4, -q q5, -q q6, -q q7",
    ),
    "a queue that only holds others": (
        asks(queue="lab"),
        settings_of(LAB),
        "queue lab takes no jobs itself, only the queues below it do",
        "name one of them: -q speech, -q vision",
    ),
    "a default QOS that is not configured": (
        asks(),
        Settings(default=DefaultSettings(qos="night")),
        "there is no QOS 'night', because none is configured",
        "set [default] qos to nothing in the config file",
    ),
    "normal that names the default, which does not admit the user": (
        asks(qos="normal"),
        Settings(default=DefaultSettings(qos="night"), qos={"night": replace(NIGHT, users=("bob",))}),
        "user ann of account ann may not use QOS night",
        "submit without --qos",
    ),
    "a QOS of the name normal that does not admit the user": (
        asks(qos="normal"),
        settings_of(qos=[QosSettings("normal", users=("bob",))]),
        "user ann of account ann may not use QOS normal",
        "submit without --qos",
    ),
    "an unknown QOS": (
        asks(qos="nigt"),
        settings_of(qos=[DAYTIME, NIGHT]),
        "there is no QOS 'nigt'",
        "did you mean --qos night?",
    ),
    "a user whom the queue does not name": (
        asks(),
        settings_of([replace(VISION, users=("bob",)), queue("nlp")]),
        "user ann of account ann may not submit to queue vision",
        "name it: -q nlp",
    ),
    "a user whom no queue names": (
        asks(account="lab"),
        settings_of([replace(VISION, users=("bob",), accounts=("chem",))]),
        "user ann of account lab may not submit to queue vision",
        "see who may use which with: ginfo queues",
    ),
    "a user whom the queue above does not name": (
        asks(),
        settings_of([queue("lab", users=("bob",)), queue("vision", "lab")]),
        "user ann of account ann may not submit to queue lab",
        "see who may use which with: ginfo queues",
    ),
    "a user whom the queue above names, but not the queue": (
        asks(),
        settings_of([queue("lab", users=("ann",)), queue("vision", "lab", users=("bob",)), queue("nlp", "lab")]),
        "user ann of account ann may not submit to queue vision",
        "name it: -q nlp",
    ),
    "an account above one that the queue names": (
        asks(account="science"),
        settings_of([replace(VISION, accounts=("physics",))], accounts=LABS),
        "user ann of account science may not submit to queue vision",
        "see who may use which with: ginfo queues",
    ),
    "a user whom the QOS does not name": (
        asks(qos="night"),
        settings_of(qos=[replace(NIGHT, users=("bob",)), DAYTIME]),
        "user ann of account ann may not use QOS night",
        "name it: --qos day",
    ),
    "a user whom no QOS names": (
        asks(qos="night"),
        settings_of(qos=[replace(NIGHT, accounts=("chem",))]),
        "user ann of account ann may not use QOS night",
        "submit without --qos",
    ),
    "more GPUs than a job may have": (
        asks(3),
        settings_of([replace(VISION, max_gpus_per_job=2.0)]),
        "asked for 3 GPUs; a job in queue vision may hold at most 2 GPUs",
        "ask for less: -g 2",
    ),
    "more GPUs than a user may have": (
        asks(3),
        settings_of([replace(VISION, max_gpus_per_job=8.0, max_gpus_per_user=1.0)]),
        "asked for 3 GPUs; a user in queue vision may hold at most 1 GPU",
        "ask for less: -g 1",
    ),
    "more GPUs than the queue may hold": (
        asks(3),
        settings_of([replace(VISION, max_gpus=2.5)]),
        "asked for 3 GPUs; queue vision may hold at most 2.5 GPUs",
        "ask for less: -g 2",
    ),
    "more GPUs than the queue above may hold": (
        asks(3),
        settings_of([queue("lab", max_gpus=2.0), queue("vision", "lab")]),
        "asked for 3 GPUs; queue lab may hold at most 2 GPUs",
        "ask for less: -g 2",
    ),
    "a larger part of a card than a job may have": (
        asks(1, gpu_fraction=0.75),
        settings_of([replace(VISION, max_gpus_per_job=0.5)]),
        "asked for 0.75 GPUs; a job in queue vision may hold at most 0.5 GPUs",
        "ask for less: -g 0.5",
    ),
    "a GPU where none may be held": (
        asks(1),
        settings_of([replace(VISION, max_gpus=0.0)]),
        "asked for 1 GPU; queue vision may hold none",
        "name another one, or ask for no GPU",
    ),
    "a slice by memory where no GPU may be held": (
        asks(1, vram_mib=GIB),
        settings_of([replace(VISION, max_gpus=0.0)]),
        "asked for 1 GPU; queue vision may hold none",
        "name another one, or ask for no GPU",
    ),
    "a gang that is too large together": (
        asks(2, nodes=3),
        settings_of([replace(VISION, max_gpus_per_job=4.0)]),
        "asked for 6 GPUs on 3 nodes; a job in queue vision may hold at most 4 GPUs",
        "ask for fewer nodes, or for at most -g 4 on all of them together",
    ),
    "a gang of two": (
        asks(1, nodes=2),
        settings_of([replace(VISION, max_gpus_per_job=1.0)]),
        "asked for 2 GPUs on 2 nodes; a job in queue vision may hold at most 1 GPU",
        "ask for fewer nodes, or for at most -g 1 on all of them together",
    ),
    "more cores than the queue may hold": (
        asks(cpus=9.5),
        settings_of([replace(VISION, max_cpus=8.0)]),
        "asked for 9.5 CPUs; queue vision may hold at most 8 CPUs",
        "ask for less: -c 8",
    ),
    "more memory than the queue may hold": (
        asks(mem_mib=9 * GIB),
        settings_of([replace(VISION, max_mem_mib=8 * GIB)]),
        "asked for 9G of memory; queue vision may hold at most 8G of memory",
        "ask for less: -m 8G",
    ),
    "more GPUs than a job of the QOS may have": (
        asks(3, qos="night"),
        settings_of(qos=[replace(NIGHT, max_gpus_per_job=2.0)]),
        "asked for 3 GPUs; a job in QOS night may hold at most 2 GPUs",
        "ask for less: -g 2",
    ),
    "more GPUs than the QOS may hold": (
        asks(3, qos="night"),
        settings_of(qos=[replace(NIGHT, max_gpus=2.0)]),
        "asked for 3 GPUs; QOS night may hold at most 2 GPUs",
        "ask for less: -g 2",
    ),
    "longer than the queue allows": (
        asks(limit_s=2 * DAY),
        settings_of([replace(VISION, max_time_s=DAY)]),
        "asked for a time limit of 2-00:00:00; queue vision allows at most 1-00:00:00",
        "ask for less: -t 1-00:00:00",
    ),
    "longer than the queue above allows": (
        asks(limit_s=2 * HOUR),
        settings_of([queue("lab", max_time_s=HOUR), queue("vision", "lab", max_time_s=DAY)]),
        "asked for a time limit of 2:00:00; queue lab allows at most 1:00:00",
        "ask for less: -t 1:00:00",
    ),
    "longer than the QOS allows": (
        asks(limit_s=2 * HOUR, qos="night"),
        settings_of([replace(VISION, max_time_s=DAY)], qos=[replace(NIGHT, max_time_s=HOUR)]),
        "asked for a time limit of 2:00:00; QOS night allows at most 1:00:00",
        "ask for less: -t 1:00:00",
    ),
}


@pytest.mark.parametrize(("asked", "settings", "text", "hint"), REFUSED.values(), ids=REFUSED)
def test_a_submission_is_refused(asked, settings, text, hint):
    assert refused(asked, settings) == (text, hint)


FULL = Tally(
    by_queue={"vision": 3, "speech": 2},
    by_queue_user={("vision", "ann"): 2, ("vision", "bob"): 1, ("speech", "ann"): 1},
    by_qos_user={("night", "ann"): 2, ("day", "ann"): 1},
)

COUNTED = {
    "room in the queue": (asks(), settings_of([replace(VISION, max_jobs=4)]), None),
    "room for the user": (asks(), settings_of([replace(VISION, max_jobs_per_user=3)]), None),
    "room in the queue above": (
        asks(),
        settings_of([queue("lab", max_jobs=6, max_jobs_per_user=4), *LAB[1:]]),
        None,
    ),
    "room for the user in the QOS": (asks(qos="night"), settings_of(qos=[replace(NIGHT, max_jobs_per_user=3)]), None),
    "other queues are full": (
        asks(queue="nlp"),
        settings_of([replace(VISION, max_jobs=3), queue("nlp", max_jobs=1)]),
        None,
    ),
    "the queue is full": (
        asks(),
        settings_of([replace(VISION, max_jobs=3)]),
        ("queue vision may hold 3 jobs and holds 3", "wait until some have ended, or cancel some: gq -q vision"),
    ),
    "the queue is more than full": (
        asks(),
        settings_of([replace(VISION, max_jobs=1)]),
        ("queue vision may hold 1 job and holds 3", "wait until some have ended, or cancel some: gq -q vision"),
    ),
    "the queue above is full": (
        asks(),
        settings_of([queue("lab", max_jobs=5), *LAB[1:]]),
        ("queue lab may hold 5 jobs and holds 5", "wait until some have ended, or cancel some: gq -q lab"),
    ),
    "the user has as many as one may": (
        asks(),
        settings_of([replace(VISION, max_jobs_per_user=2)]),
        ("user ann may have 2 jobs in queue vision and has 2", "wait until some have ended, or cancel some: gq -u ann"),
    ),
    "the user has as many as one may in the queue above": (
        asks(),
        settings_of([queue("lab", max_jobs_per_user=3), *LAB[1:]]),
        ("user ann may have 3 jobs in queue lab and has 3", "wait until some have ended, or cancel some: gq -u ann"),
    ),
    "the user has as many as one may in the QOS": (
        asks(qos="night"),
        settings_of(qos=[replace(NIGHT, max_jobs_per_user=2)]),
        ("user ann may have 2 jobs in QOS night and has 2", "wait until some have ended, or cancel some: gq -u ann"),
    ),
    "the first job of the user in the QOS": (
        asks(qos="dusk"),
        settings_of(qos=[QosSettings("dusk", max_jobs_per_user=1)]),
        None,
    ),
    "the default QOS counts": (
        asks(),
        replace(
            settings_of(qos=[replace(NIGHT, max_jobs_per_user=2)]),
            default=DefaultSettings(qos="night"),
        ),
        ("user ann may have 2 jobs in QOS night and has 2", "wait until some have ended, or cancel some: gq -u ann"),
    ),
}


@pytest.mark.parametrize(("asked", "settings", "wanted"), COUNTED.values(), ids=COUNTED)
def test_existing_jobs_count_against_limits(asked, settings, wanted):
    assert refused(asked, settings, FULL) == wanted


def test_names_are_checked_before_amounts_and_amounts_before_counts():
    full = queue("vision", users=("bob",), max_gpus_per_job=1.0, max_time_s=60, max_jobs=3)
    asked = asks(2, "vison", "nobody", "nigt", limit_s=120)
    steps = [
        (asked, full, "there is no queue"),
        (replace(asked, queue="vision"), full, "there is no QOS"),
        (replace(asked, queue="vision", qos="", account="chem"), full, "may not submit"),
        (replace(asked, queue="vision", qos="", account="chem"), replace(full, users=("ann",)), "asked for 2 GPUs"),
        (
            replace(asked, queue="vision", qos="", account="chem", request=request(1)),
            replace(full, users=("ann",)),
            "asked for a time limit",
        ),
        (
            replace(asked, queue="vision", qos="", account="chem", request=request(1), time_limit_s=60),
            replace(full, users=("ann",)),
            "may hold 3 jobs",
        ),
    ]
    for step, limits, text in steps:
        found = refused(step, settings_of([limits], [DAYTIME], LABS), FULL)
        assert found is not None
        assert text in found[0]


# Time limits

SHORT = replace(VISION, default_time_s=60)
BELOW_SHORT = [queue("lab", default_time_s=60), queue("vision", "lab")]

TIME_LIMITS = {
    "none anywhere": (asks(), settings_of(), (None, "")),
    "what is asked": (asks(limit_s=DAY), settings_of([replace(VISION, max_time_s=HOUR)], time_limit_s=60), (DAY, "")),
    "the default": (asks(), settings_of(time_limit_s=60), (60, "default")),
    "the default of the queue": (asks(), settings_of([SHORT], time_limit_s=HOUR), (60, "default")),
    "the default of the queue above": (asks(), settings_of(BELOW_SHORT, time_limit_s=HOUR), (60, "default")),
    "the default where that of another queue differs": (
        asks(queue="nlp"),
        settings_of([SHORT, queue("nlp")], time_limit_s=HOUR),
        (HOUR, "default"),
    ),
    "what is asked whatever the default": (asks(limit_s=DAY), settings_of([SHORT]), (DAY, "")),
    "none where none is asked for": (
        replace(asks(), time_limit_source="unlimited"),
        settings_of([SHORT], time_limit_s=HOUR),
        (None, "unlimited"),
    ),
    "the longest of the queue": (asks(), settings_of([replace(VISION, max_time_s=HOUR)]), (HOUR, "maximum")),
    "the default where the queue allows more": (
        asks(),
        settings_of([replace(VISION, max_time_s=HOUR)], time_limit_s=60),
        (60, "default"),
    ),
    "the longest of the queue where the default is more": (
        asks(),
        settings_of([replace(VISION, max_time_s=HOUR)], time_limit_s=DAY),
        (HOUR, "maximum"),
    ),
    "the shortest up the tree": (
        asks(),
        settings_of([queue("lab", max_time_s=HOUR), queue("vision", "lab", max_time_s=DAY)]),
        (HOUR, "maximum"),
    ),
    "that of the QOS": (
        asks(qos="night"),
        settings_of([replace(VISION, max_time_s=DAY)], qos=[replace(NIGHT, max_time_s=60)]),
        (60, "maximum"),
    ),
    "of another queue it does not matter": (
        asks(queue="nlp"),
        settings_of([replace(VISION, max_time_s=HOUR)]),
        (None, ""),
    ),
}


@pytest.mark.parametrize(("asked", "settings", "wanted"), TIME_LIMITS.values(), ids=TIME_LIMITS)
def test_the_time_limit_is(asked, settings, wanted):
    assert time_limit(asked, settings) == wanted


def test_a_missing_time_limit_is_refused_where_the_queue_has_a_maximum():
    lab = settings_of([replace(VISION, max_time_s=DAY)], qos=[replace(NIGHT, max_time_s=HOUR)])
    asked = replace(asks(), time_limit_source="unlimited")
    most = "queue vision allows at most 1-00:00:00"
    assert refused(asked, lab) == (f"asked for no time limit; {most}", "ask for one: -t 1-00:00:00")
    at_night = replace(asked, qos="night")
    assert refused(at_night, lab) == (
        "asked for no time limit; QOS night allows at most 1:00:00",
        "ask for one: -t 1:00:00",
    )
    assert refused(replace(asked, queue="nlp"), settings_of([VISION, queue("nlp")])) is None


# For any limits

some = st.sampled_from([None, 0.0, 0.5, 1.0, 2.0, 4.0])
requests = st.builds(
    request,
    gpus=st.integers(0, 5),
    cpus=st.sampled_from([0.0, 1.0, 3.0]),
    mem_mib=st.sampled_from([0, 100, 1000]),
    nodes=st.integers(1, 2),
)
limits = st.builds(
    dict,
    max_gpus=some,
    max_gpus_per_job=some,
    max_gpus_per_user=some,
    max_cpus=some,
    max_mem_mib=st.sampled_from([None, 100, 1000]),
)


@given(limits, limits, requests)
def test_admitted_jobs_can_start_on_empty_queues_and_refused_ones_never_can(above, below, asked):
    settings = settings_of([queue("lab", **above), queue("vision", "lab", **below)])
    wanted = asks()
    wanted = replace(wanted, request=asked)
    layout = ClusterLayout([node(gpus=8)], settings)
    terms = JobTerms(1000, "ann", "ann", "vision", request=asked)
    denial = Quotas(settings, layout).why_not(terms, demand(layout, asked))
    assert (refused(wanted, settings) is None) == (denial is None)
