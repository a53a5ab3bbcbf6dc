"""The time limit that jobs like it keep: from their run times alone, and through the daemon's memory."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lab import ANN, BOB, Lab

from gpusched.addons.simulate.engine import SimulatedOutcome
from gpusched.api.resubmit import read_resubmission
from gpusched.daemon.forecast import dry_run
from gpusched.errors import Refused
from gpusched.model.commands import PipelineStep, ResumePipeline, Submit, SubmitPipeline, Update
from gpusched.model.job import ArraySpec, Job
from gpusched.model.pipeline import StepNeeds
from gpusched.model.queue_settings import QosSettings, QueueSettings
from gpusched.model.settings import DefaultSettings
from gpusched.model.snapshot import Prediction
from gpusched.model.states import JobState
from gpusched.model.value import replace
from gpusched.ports import JobFilter
from gpusched.predict.limits import LEAST, advise, rounded_up, usual_span
from gpusched.predict.predictor import RUNS_KEPT, EndedRun, Overruns
from gpusched.testing import launch, request, spec

HOUR = 3600
TRAIN = launch("train.sh")


# --- from run times -------------------------------------------------------------------------------


def runs(whole_s: list[float], cut_s: Sequence[float] = ()) -> list[EndedRun]:
    return [EndedRun(run_s, None, False) for run_s in whole_s] + [EndedRun(run_s, 60, True) for run_s in cut_s]


@pytest.mark.parametrize(
    ("whole_s", "cut_s", "limit_s", "why"),
    [
        pytest.param([60.0] * 40, [], 300, "95 % of 40 jobs like it took less", id="all alike"),
        pytest.param(
            [*[HOUR] * 39, 30 * HOUR], [], 4200, "95 % of 40 jobs like it took less", id="one of 40 is much longer"
        ),
        pytest.param(
            [*[HOUR] * 17, 2 * HOUR],
            [],
            3 * HOUR,
            "half again as long as the longest of 18 jobs like it",
            id="too few to tell 95 % of them",
        ),
        pytest.param([HOUR] * LEAST, [], 5400, "half again as long as the longest of 3 jobs like it", id="just enough"),
        pytest.param(
            [HOUR] * 37,
            [2 * HOUR] * 3,
            3 * HOUR,
            "half again as long as the longest of 40 jobs like it, 3 of them ended by a time limit",
            id="more were cut off than may be",
        ),
        pytest.param(
            [],
            [2 * HOUR] * 3,
            3 * HOUR,
            "half again as long as the longest of 3 jobs like it, 3 of them ended by a time limit",
            id="all were cut off",
        ),
    ],
)
def test_the_advised_limit_covers_nearly_all_runs(
    whole_s: list[float], cut_s: list[float], limit_s: int, why: str
) -> None:
    found = advise(runs(whole_s, cut_s))
    assert found is not None
    assert (found.limit_s, found.why) == (limit_s, why)
    assert found.runs == len(whole_s) + len(cut_s)


def test_too_few_runs_give_no_advice() -> None:
    assert advise(runs([60.0] * (LEAST - 1))) is None
    assert advise(runs([60.0], [60.0])) is None


@given(st.lists(st.floats(1, 1e6), min_size=LEAST, max_size=60), st.lists(st.floats(1, 1e6), max_size=20))
def test_the_stated_properties_of_advice_hold(whole_s: list[float], cut_s: list[float]) -> None:
    found = advise(runs(whole_s, cut_s))
    assert found is not None
    kept = sum(run_s <= found.limit_s for run_s in whole_s)
    if found.why.startswith("95 %"):
        assert kept >= 0.95 * found.runs
    else:
        assert kept == len(whole_s)
        assert found.limit_s >= min(1.5 * max([*whole_s, *cut_s]), 10 * 365 * 86400)
    assert found.limit_s >= found.least_s


def test_limits_learned_from_truncated_runs_do_not_shrink() -> None:
    """Jobs under the advised limit, over and over: without the runs it ends, each advice would be below the last."""
    draw = random.Random(1)
    lengths = Overruns()
    limits = []
    ended = 0
    for number in range(2000):
        advice = advise(lengths.ended("train"))
        run_s = draw.lognormvariate(8, 0.7)
        if advice is None or run_s <= advice.limit_s:
            lengths.learn("train", "ann", EndedRun(run_s, None, False))
        else:
            lengths.learn("train", "ann", EndedRun(advice.limit_s, advice.limit_s, True))
            ended += number >= RUNS_KEPT
        if advice is not None:
            limits.append(advice.limit_s)
    assert ended <= 0.06 * 2000
    early, late = limits[100:600], limits[-500:]
    assert sum(late) / len(late) > 0.8 * sum(early) / len(early)


@pytest.mark.parametrize(
    ("length_s", "limit_s"),
    [(1, 300), (301, 600), (7200, 7200), (7201, 7800), (11_350, 11_400), (30_000, 30_600), (86_401, 108_000)],
)
def test_limits_are_rounded_up_to_typed_values(length_s: float, limit_s: int) -> None:
    assert rounded_up(length_s) == limit_s


@pytest.mark.parametrize(
    ("low_s", "high_s", "words"),
    [
        (HOUR * 1.0, HOUR * 3.0, "60 min to 3 h"),
        (HOUR * 2.0, HOUR * 3.5, "2 to 3.5 h"),
        (20.0, 50.0, "20 to 50 s"),
        (0.0, 0.2, "about 1 s"),
        (290.0, 310.0, "about 5 min"),
        (86_400 * 2.0, 86_400 * 11.2, "2 to 11 d"),
    ],
)
def test_run_times_are_printed_readably(low_s: float, high_s: float, words: str) -> None:
    assert usual_span(Prediction(low_s, (low_s + high_s) / 2, high_s, 9)) == words


# --- in the daemon --------------------------------------------------------------------------------


def a_lab(**sections: Any) -> Lab:
    return Lab(**{"gpus": 2, "outcome": SimulatedOutcome(runs_s=HOUR), **sections})


def ended(lab: Lab, times: int, **parts: Any) -> None:
    for _ in range(times):
        lab.submit(**{"launch": TRAIN, "request": request(gpus=1), **parts})
        lab.tick(max(lab.outcome.runs_s, 1) + 1)
        lab.tick(1)
        lab.tick(1)
    assert not lab.scheduler.state.jobs


def auto(**parts: Any) -> Any:
    return replace(spec(**{"launch": TRAIN, "request": request(gpus=1), **parts}), time_limit_source="auto")


def asked(lab: Lab, command: Any) -> dict[str, Any]:
    (answer,) = lab.ask(command)
    if isinstance(answer, Exception):
        raise answer
    return dict(answer)


def hand_in(lab: Lab, *specs: Any, caller: Any = ANN) -> tuple[dict[str, Any], list[Job]]:
    answer = asked(lab, Submit(caller, specs, {"0" * 64: b"{}"}))
    return answer, [lab.job(job_id) for job_id in answer["ids"]]


def limit_of(job: Job) -> tuple[int | None, str]:
    return job.spec.time_limit_s, job.spec.time_limit_source


def test_auto_uses_the_limit_of_similar_jobs_and_says_so() -> None:
    lab = a_lab()
    ended(lab, 4)
    answer, (made,) = hand_in(lab, auto())
    assert limit_of(made) == (5400, "auto")
    text = "time limit 1:30:00: half again as long as the longest of 4 jobs like it"
    assert answer["limits"] == [text]
    (story,) = [event.text for event in lab.store.events(made.id) if event.kind == "submitted"]
    assert story == f"submitted by ann; {text}"
    # Of the same user, command and number of GPUs.
    for other in (hand_in(lab, auto(), caller=BOB), hand_in(lab, auto(request=request(gpus=2)))):
        assert limit_of(other[1][0]) == (None, "")


def test_auto_is_known_after_a_restart() -> None:
    lab = a_lab()
    ended(lab, 3)
    lab.restart()
    _, (made,) = hand_in(lab, auto())
    assert limit_of(made) == (5400, "auto")


def test_timed_out_runs_count_as_longer_before_and_after_a_restart() -> None:
    lab = a_lab()
    ended(lab, 3, time_limit_s=600)
    assert len(lab.store.jobs(JobFilter(states=frozenset({JobState.TIMEOUT})))) == 3
    text = "time limit 15:00: half again as long as the longest of 3 jobs like it, 3 of them ended by a time limit"
    for _ in range(2):
        answer, (made,) = hand_in(lab, auto(hold=True))
        assert limit_of(made) == (900, "auto")
        assert answer["limits"] == [text]
        lab.restart()


@pytest.mark.parametrize(
    ("default", "queue", "wanted", "text"),
    [
        pytest.param({}, {}, (None, ""), "no time limit: fewer than 3 jobs like it have ended", id="no default"),
        pytest.param(
            {"time_limit_s": HOUR},
            {},
            (HOUR, "default"),
            "time limit 1:00:00, the default: fewer than 3 jobs like it have ended",
            id="a default",
        ),
        pytest.param(
            {"time_limit_s": HOUR},
            {"max_time_s": 600},
            (600, "maximum"),
            "time limit 10:00, the longest that is allowed: fewer than 3 jobs like it have ended",
            id="a queue that allows less",
        ),
    ],
)
def test_auto_without_runs_means_no_limit_and_says_so(
    default: dict[str, Any], queue: dict[str, Any], wanted: tuple[int | None, str], text: str
) -> None:
    lab = a_lab(default=DefaultSettings(**default), queue={"default": QueueSettings("default", **queue)})
    answer, (made,) = hand_in(lab, auto())
    assert (limit_of(made), answer["limits"]) == (wanted, [text])


def test_auto_respects_queue_and_qos() -> None:
    lab = a_lab(
        queue={"default": QueueSettings("default", max_time_s=2 * HOUR)},
        qos={"rush": QosSettings("rush", max_time_s=HOUR)},
    )
    ended(lab, 4)
    answer, (made, rushed) = hand_in(lab, auto(), auto(qos="rush"))
    assert (limit_of(made), limit_of(rushed)) == ((5400, "auto"), (HOUR, "auto"))
    assert answer["limits"][1].startswith("time limit 1:00:00, the longest that is allowed, in place of 1:30:00: half")


def test_auto_works_for_arrays_batches_and_pipeline_steps() -> None:
    lab = a_lab()
    ended(lab, 4)
    answer, made = hand_in(lab, auto(array=ArraySpec("0-9")), auto(), auto(launch=launch("other.sh")))
    assert [limit_of(job) for job in made] == [(5400, "auto"), (5400, "auto"), (None, "")]
    assert len(answer["limits"]) == 2
    steps = [PipelineStep("a", auto(), StepNeeds(), "step a"), PipelineStep("b", spec(), StepNeeds(), "step b")]
    answer = asked(lab, SubmitPipeline(ANN, "p", "", steps, {}))
    assert limit_of(lab.job(int(answer["jobs"]["a"]))) == (5400, "auto")
    assert answer["limits"] == ["step a: time limit 1:30:00: half again as long as the longest of 4 jobs like it"]


def test_a_dry_run_shows_the_limit() -> None:
    lab = a_lab()
    ended(lab, 4)
    found = dry_run(auto(), ANN, lab.scheduler)()
    assert (found.verdict, found.time_limit_s, found.time_limit_source) == ("starts_now", 5400, "auto")
    assert found.limit_text.startswith("time limit 1:30:00: half again")
    stated = dry_run(spec(time_limit_s=60), ANN, lab.scheduler)()
    assert (stated.time_limit_s, stated.time_limit_source, stated.limit_text) == (60, "user", "")


def test_an_update_to_auto_is_resolved_while_the_job_waits() -> None:
    lab = a_lab()
    ended(lab, 4)
    job_id = lab.submit(launch=TRAIN, request=request(gpus=1), hold=True, time_limit_s=60)
    change = {"time_limit_s": None, "time_limit_source": "auto"}
    answer = asked(lab, Update(ANN, (job_id,), change))
    assert limit_of(lab.job(job_id)) == (5400, "auto")
    assert answer["notes"] == ["time limit 1:30:00: half again as long as the longest of 4 jobs like it"]
    running = lab.submit(launch=TRAIN, request=request(gpus=1))
    lab.tick(1)
    with pytest.raises(Refused, match="time=auto works only while a job is pending"):
        asked(lab, Update(ANN, (running,), change))


def test_moving_a_job_applies_the_default_of_its_new_queue() -> None:
    queues = {
        "default": QueueSettings("default", default_time_s=HOUR),
        "short": QueueSettings("short", max_time_s=600),
    }
    lab = a_lab(queue=queues)
    job_id, stated = lab.submit(hold=True), lab.submit(hold=True, time_limit_s=300)
    assert limit_of(lab.job(job_id)) == (HOUR, "default")
    asked(lab, Update(ANN, (job_id, stated), {"queue": "short"}))
    assert (limit_of(lab.job(job_id)), limit_of(lab.job(stated))) == ((600, "maximum"), (300, ""))
    asked(lab, Update(ANN, (job_id,), {"queue": "default"}))
    assert limit_of(lab.job(job_id)) == (HOUR, "default")
    asked(lab, Update(ANN, (job_id,), {"time_limit_s": None, "time_limit_source": "unlimited"}))
    assert limit_of(lab.job(job_id)) == (None, "unlimited")
    with pytest.raises(Refused, match="asked for no time limit; queue short allows at most 10:00"):
        asked(lab, Update(ANN, (job_id,), {"queue": "short"}))
    asked(lab, Update(ANN, (job_id,), {"time_limit_s": None, "time_limit_source": ""}))
    assert limit_of(lab.job(job_id)) == (HOUR, "default")


def test_a_default_limit_is_not_a_user_limit() -> None:
    """Neither do careful users pass for careless because of it, nor is it taken for how long a job runs."""
    lab = a_lab(default=DefaultSettings(time_limit_s=24 * HOUR))
    history = lab.scheduler.history
    history.load()
    ended(lab, 20, time_limit_s=HOUR + 1)
    before = history.measure("ann")
    assert (before.runs, before.is_better) == (20, False)
    ended(lab, 5, request=request(gpus=2))
    assert history.measure("ann") == before
    lab.restart()
    lab.scheduler.history.load()
    assert lab.scheduler.history.measure("ann").runs == 20
    job_id = lab.submit(launch=TRAIN, request=request(gpus=1), hold=True)
    found = lab.scheduler.history.guess(lab.job(job_id))
    assert found is not None
    assert 0.8 * HOUR <= found.expected_s <= 1.3 * HOUR
    assert found.plan_s <= 1.3 * HOUR
    stated = lab.submit(launch=TRAIN, request=request(gpus=1), hold=True, time_limit_s=2 * HOUR)
    assert lab.scheduler.history.guess(lab.job(stated)) is None, "its limit is gone by"


@pytest.mark.parametrize(
    ("before", "changes", "wanted"),
    [
        pytest.param((5400, "auto"), {}, (None, "auto"), id="auto is worked out anew"),
        pytest.param((HOUR, "default"), {}, (None, ""), id="a default is that of today"),
        pytest.param((HOUR, "maximum"), {}, (None, ""), id="so is the longest that is allowed"),
        pytest.param((None, "unlimited"), {}, (None, "unlimited"), id="none stays none"),
        pytest.param((HOUR, ""), {}, (HOUR, ""), id="what was stated stays"),
        pytest.param((HOUR, "default"), {"time_limit_s": 60}, (60, ""), id="another is stated"),
        pytest.param((HOUR, ""), {"time_limit_s": "auto"}, (None, "auto"), id="auto is asked for"),
        pytest.param((HOUR, "auto"), {"time_limit_s": None}, (None, ""), id="it is taken back"),
    ],
)
def test_a_repeated_job_requests_the_originally_requested_limit(
    before: tuple[int | None, str], changes: dict[str, Any], wanted: tuple[int | None, str]
) -> None:
    lab = a_lab()
    old = lab.job(lab.submit(hold=True))
    old = replace(old, spec=replace(old.spec, time_limit_s=before[0], time_limit_source=before[1]))
    (made,) = read_resubmission([old], changes, ANN, lab.settings, lab.store).specs
    assert (made.time_limit_s, made.time_limit_source) == wanted


def test_a_step_that_hit_its_automatic_limit_resumes_with_a_longer_one() -> None:
    lab = a_lab()
    ended(lab, 3)
    lab.outcome = SimulatedOutcome(runs_s=2 * HOUR)
    answer = asked(
        lab, SubmitPipeline(ANN, "p", "", [PipelineStep("a", auto(), StepNeeds(), "step a")], {"0" * 64: b"{}"})
    )
    first = int(answer["jobs"]["a"])
    lab.tick(1)
    lab.tick(5400 + 60)
    lab.tick(60)
    assert lab.job(first).state is JobState.TIMEOUT
    again = asked(lab, ResumePipeline(ANN, 1))
    assert limit_of(lab.job(int(again["jobs"]["a"]))) == (8400, "auto")
    assert again["limits"][0].startswith(
        "step a: time limit 2:20:00: half again as long as the longest of 4 jobs like it"
    )
