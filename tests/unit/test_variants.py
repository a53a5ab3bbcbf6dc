"""Jobs with variants in a scheduler turned by hand: what is booked, told and kept, and what begins anew."""

from __future__ import annotations

from typing import Any

import pytest
from lab import ANN, ROOT, Lab
from memory import check_memory

from gpusched.addons.simulate.engine import SimulatedOutcome
from gpusched.addons.slurm.handover.losses import HANDOVER, check_losses
from gpusched.api.schema import SPEC_FIELDS, check_fields
from gpusched.api.validate import read_changes, read_submission
from gpusched.cli.job_options import gsub_table
from gpusched.cli.parse import parse
from gpusched.cli.submission import over, spec_of
from gpusched.errors import GpuschedError, Refused, UsageError
from gpusched.lifecycle.fallback import make_fallback
from gpusched.lifecycle.transitions import last_start_at
from gpusched.model.commands import Cancel, Requeue, Selection, Submit, Update
from gpusched.model.job import ArraySpec, Job, JobSpec, Request, RetryRule
from gpusched.model.queue_settings import QueueSettings
from gpusched.model.settings import Settings
from gpusched.model.states import JobState
from gpusched.model.value import decode, encode, replace
from gpusched.model.variants import (
    each_variant,
    gpu_demand,
    gpu_demands,
    gpu_request,
    gpu_requests,
    names_of,
    of_specs,
)
from gpusched.scheduler.admission import as_submitted
from gpusched.scheduler.burst import why_kept
from gpusched.store.rows import JobReader, spec_row
from gpusched.testing import NOW, job, launch, spec

A2, R2 = Request(2, gpu_type="a100"), Request(2, gpu_type="rtx3090")
A1, R1 = Request(1, gpu_type="a100"), Request(1, gpu_type="rtx3090")
FOREVER = SimulatedOutcome(runs_s=1e9)


def either(*requests: Request, limits: tuple[int | None, ...] = (), **parts: Any) -> JobSpec:
    """A submission with these variants, each with its own time limit if given."""
    made = spec(launch=launch("true"), **parts)
    times = limits or (made.time_limit_s,) * len(requests)
    specs = [replace(made, request=one, time_limit_s=limit) for one, limit in zip(requests, times, strict=True)]
    return of_specs(specs, [(), *[("gpus", "gpu_type")] * (len(requests) - 1)])


def make_lab(**parts: Any) -> Lab:
    """Two A100s on one node, two RTX 3090s on the other."""
    return Lab(more_nodes=("n2",), models={"n2": "RTX 3090"}, **{"outcome": FOREVER, **parts})


def submit(lab: Lab, made: JobSpec) -> int:
    (answer,) = lab.ask(Submit(ANN, [made], {"0" * 64: b""}))
    if isinstance(answer, GpuschedError):
        raise answer
    return int(answer["ids"][0])


def node_of(lab: Lab, job_id: int) -> str | None:
    return lab.store.runs([job_id])[-1].node if lab.job(job_id).state is JobState.RUNNING else None


def test_each_job_has_the_request_of_its_variant_once_it_runs() -> None:
    lab = make_lab()
    first, second, third = (submit(lab, either(A2, R2, limits=(3600, 7200))) for _ in range(3))
    assert [node_of(lab, one) for one in (first, second, third)] == ["n1", "n2", None]
    assert [lab.job(one).spec.request for one in (first, second, third)] == [A2, R2, A2]
    assert [lab.job(one).spec.time_limit_s for one in (first, second, third)] == [3600, 7200, 3600]
    assert "started on n2, GPU 0,1, with -g rtx3090:2 -t 2:00:00" in [one.text for one in lab.store.events(second)]
    held = {one.job_id: one.terms.request for one in lab.scheduler.state.holds.values()}
    assert held == {first: A2, second: R2}
    lab.restart()
    check_memory(lab)
    assert lab.ticker.check_planner() == []


def test_a_requeued_job_has_all_its_variants_again() -> None:
    lab = make_lab()
    (other,) = (submit(lab, either(A2)),)
    moved = submit(lab, either(A2, R2))
    assert node_of(lab, moved) == "n2"
    lab.ask(Cancel(ROOT, Selection(ids=(other,))))
    lab.tick(1)
    lab.ask(Requeue(ROOT, (moved,)))
    for _ in range(4):
        lab.tick(1)
    assert (node_of(lab, moved), lab.job(moved).run, lab.job(moved).spec.request) == ("n1", 2, A2)


def test_a_retry_begins_with_all_variants() -> None:
    lab = make_lab(outcome=SimulatedOutcome(runs_s=1, exit_code=1))
    lab.outcomes["1.1"] = FOREVER
    submit(lab, either(A2))
    failing = submit(lab, either(A2, R2, retry=RetryRule(retries=1, backoff_s=1000.0)))
    for _ in range(4):
        lab.tick(1)
    failed = lab.job(failing)
    assert (failed.state, failed.run, failed.spec.request, len(failed.spec.variants)) == (JobState.PENDING, 1, A2, 2)


def test_memory_that_ran_out_grows_in_the_variant_that_ran_out_of_it() -> None:
    slices = replace(A1, vram_mib=8192), replace(R1, vram_mib=8192)
    lab = make_lab(outcome=SimulatedOutcome(runs_s=1, exit_code=1, gpu_oom=True))
    lab.outcomes["1.1"] = FOREVER
    submit(lab, either(A2))
    failing = submit(lab, either(*slices, retry=RetryRule(retries=1, backoff_s=1000.0)))
    for _ in range(4):
        lab.tick(1)
    first, second = (one.request.vram_mib for one in lab.job(failing).spec.variants)
    assert (first, second) == (8192, 12288)
    assert lab.job(failing).spec.request.vram_mib == 8192


def test_tasks_of_an_array_choose_by_themselves() -> None:
    lab = make_lab()
    array = submit(lab, either(A1, R1, array=ArraySpec("0-5")))
    assert [node_of(lab, array + number) for number in (1, 2, 3, 4)] == ["n1", "n1", "n2", "n2"]
    assert lab.job(array).tasks_left == "4-5"
    check_memory(lab)


def test_a_preempted_filler_or_fallback_starts_from_the_first_variant_again() -> None:
    ran = job(1, spec=either(A2, R2, fallback="true"), state=JobState.FAILED, run=1, end_at=NOW)
    ran = replace(ran, spec=replace(ran.spec, request=R2))
    _, made, _ = make_fallback(ran, 2, NOW, "x.out")
    assert (made.spec.request, len(made.spec.variants)) == (A2, 2)
    assert as_submitted(ran.spec).request == A2


def test_a_deadline_counts_with_the_shortest_variant() -> None:
    waits = job(1, spec=either(A2, R2, limits=(7200, 600), deadline_at=NOW + 3600))
    assert last_start_at(waits) == NOW + 3000


# --- what is left out, and refused ---------------------------------------------------------------------------

LEFT_OUT = {
    "a type that is nowhere": (A2, Request(2, gpu_type="h200"), "asked for a GPU of type 'h200'"),
    "too many": (A2, Request(3, gpu_type="rtx3090"), "asked for 3 rtx3090 GPUs"),
    "a limit of the queue for good": (A1, R2, "a job in queue small may hold at most 1 GPU"),
    "too long for the queue": (A1, replace(R1, cpus=2.0), "time limit"),
}


@pytest.mark.parametrize(("good", "bad", "says"), LEFT_OUT.values(), ids=LEFT_OUT)
def test_a_variant_that_can_never_run_is_left_out_with_a_note(good: Request, bad: Request, says: str) -> None:
    queue = "small" if good is A1 else "default"
    lab = make_lab(queue={name: QueueSettings(name, **some) for name, some in QUEUES.items()})
    limits = (600, 7200) if "time" in says else (600, 600)
    for requests, times in (((good, bad), limits), ((bad, good), limits[::-1])):
        (answer,) = lab.ask(Submit(ANN, [either(*requests, limits=times, queue=queue)], {"0" * 64: b""}))
        (note,) = [text for text in answer["notes"] if "is left out" in text]
        assert says in note
        made = lab.job(answer["ids"][0]).spec
        assert (made.request, made.time_limit_s, made.variants) == (good, 600, ())


QUEUES: dict[str, dict[str, Any]] = {"default": {}, "small": {"max_gpus_per_job": 1, "max_time_s": 3600}}


def test_a_job_is_refused_only_if_all_of_its_variants_are() -> None:
    lab = make_lab()
    with pytest.raises(Refused) as refused:
        submit(lab, either(Request(2, gpu_type="h200"), Request(3, gpu_type="a100")))
    assert refused.value.message == (
        "none of its 2 variants can run; with -g h200:2: asked for a GPU of type 'h200'; the types here are A100, "
        "RTX 3090; with -g a100:3: asked for 3 a100 GPUs; the largest this scheduler can give on one node is -g a100:2"
    )
    with pytest.raises(Refused) as refused:
        submit(lab, either(A2, R2, dependency="afterok:99"))
    # What is wrong with the whole job is said once.
    assert refused.value.message == "there is no job 99 to depend on"


def test_variants_are_refused_where_a_job_has_one_request() -> None:
    lab = make_lab()
    with pytest.raises(Refused, match=r"handed over to Slurm, where a job has one request, and this one has 2 var"):
        submit(lab, either(A2, R2, engine="slurm"))
    with pytest.raises(Refused, match=r"--burst may hand the job over to Slurm"):
        submit(lab, either(A2, R2, burst=True))
    with pytest.raises(Refused, match=r"--or cannot be expressed"):
        check_losses("sbatch", {"variants": [{"gpus": 1}]})
    assert why_kept(job(1, spec=either(A2, R2))) == "it has variants"
    assert HANDOVER


# --- changes ------------------------------------------------------------------------------------------------


def change(lab: Lab, job_id: int, **changes: Any) -> Any:
    (answer,) = lab.ask(Update(ANN, (job_id,), read_changes(changes, lab.settings)))
    return answer


@pytest.fixture
def waiting() -> tuple[Lab, int]:
    lab = make_lab()
    for _ in range(2):
        submit(lab, either(A2, R2))
    return lab, submit(lab, either(A2, R2))


def requests_of(found: Job) -> list[tuple[str | None, int, float]]:
    return [(one.request.gpu_type, one.request.gpus, one.request.cpus) for one in found.spec.variants]


def test_what_all_variants_have_in_common_changes_in_all(waiting: tuple[Lab, int]) -> None:
    lab, job_id = waiting
    change(lab, job_id, cpus=3, time_limit_s=600)
    found = lab.job(job_id)
    assert requests_of(found) == [("a100", 2, 3.0), ("rtx3090", 2, 3.0)]
    assert [one.time_limit_s for one in (found.spec, *found.spec.variants)] == [600, 600, 600]
    check_memory(lab)
    assert lab.ticker.check_planner() == []


def test_what_differs_cannot_change_in_one_of_them(waiting: tuple[Lab, int]) -> None:
    lab, job_id = waiting
    refused = change(lab, job_id, gpus=1)
    assert refused.message == (
        f"the variants -g a100:2 and -g rtx3090:2 of job {job_id} differ in gpus: which of them is to change is not "
        "clear"
    )
    assert f"gctl update {job_id} or=" in refused.hint
    assert requests_of(lab.job(job_id)) == [("a100", 2, 1.0), ("rtx3090", 2, 1.0)]


def test_all_variants_can_be_named_anew_or_be_given_up(waiting: tuple[Lab, int]) -> None:
    lab, job_id = waiting
    change(lab, job_id, gpus=1, gpu_type="a100", variants=[{"gpus": 2, "gpu_type": "a100"}, {"cpus": 4}])
    assert requests_of(lab.job(job_id)) == [("a100", 1, 1.0), ("a100", 2, 1.0), ("a100", 1, 4.0)]
    assert change(lab, job_id, time_limit_s=60)["changed"]
    assert "is to change is not clear" in change(lab, job_id, cpus=2).message
    change(lab, job_id, variants=None)
    found = lab.job(job_id).spec
    assert (found.variants, found.request.gpus, found.time_limit_s) == ((), 1, 60)
    assert change(lab, job_id, variants=[{"gpus": 1, "gpu_type": "a100"}]).message.endswith(
        "variants 1 and 2 ask for the same"
    )
    lab.restart()
    check_memory(lab)


def test_a_change_that_one_variant_cannot_take_is_refused(waiting: tuple[Lab, int]) -> None:
    lab, job_id = waiting
    assert "asked for 9 CPUs" in change(lab, job_id, cpus=9).message


def test_a_running_job_keeps_its_variants_for_the_next_run() -> None:
    lab = make_lab()
    running = submit(lab, either(A2, R2, limits=(3600, 3600)))
    change(lab, running, time_limit_s=600)
    found = lab.job(running).spec
    assert (found.time_limit_s, [one.time_limit_s for one in found.variants]) == (600, [3600, 3600])
    refused = change(lab, running, variants=[{"gpus": 1}])
    assert "cannot change while it is RUNNING" in refused.message


# --- what is typed ------------------------------------------------------------------------------------------


def typed(*words: str) -> dict[str, Any]:
    return spec_of(parse(gsub_table(), words)[0])


def test_a_bar_and_or_say_the_same() -> None:
    assert typed("-g", "a100:2|rtx3090:4|0.5") == {
        "gpus": 2,
        "gpu_type": "a100",
        "variants": [{"gpus": 4, "gpu_type": "rtx3090"}, {"gpu_fraction": 0.5}],
    }
    assert (
        typed("-g", "a100:2", "--or", "-g rtx3090:4", "--or=-g0.5")["variants"]
        == typed("-g", "a|rtx3090:4|0.5")["variants"]
    )
    assert typed("--or", "-c 16 -t 8h --mem=4G -L a:2 -L b --gpus-linked")["variants"] == [
        {"cpus": 16.0, "time_limit_s": 28800, "mem_mib": 4096, "licenses": {"a": 2, "b": 1}, "gpus_linked": True}
    ]


def test_the_last_gpus_count_and_those_typed_replace_the_variants_of_a_script() -> None:
    assert "variants" not in typed("-g", "a|b", "-g", "2")
    script = parse(gsub_table(), ["-g", "a100:2", "--or", "-g rtx3090:4"])[0]
    assert "variants" not in spec_of(over(script, parse(gsub_table(), ["-g", "1"])[0]))
    more = over(script, parse(gsub_table(), ["--or", "-c 2"])[0])
    assert spec_of(more)["variants"] == [{"cpus": 2.0}]


MISTAKES = {
    "nothing behind the bar": (["-g", "a100:2|"], "'a100:2|' has an empty variant"),
    "nothing before it": (["-g", "|2"], "'|2' has an empty variant"),
    "a number that is none": (["-g", "a100:2|a100:x"], "'x' is not a whole number"),
    "both ways": (["-g", "a|b", "--or", "-c 2"], "both with | and with --or"),
    "both ways, one in the other": (["--or", "-g a|b"], "names variants with |, and so does --or"),
    "another option": (["--or", "-q fast"], "-q is not an option of a variant"),
    "a misspelt one": (["--or", "--nodlist x"], "did you mean --nodelist?"),
    "no option": (["--or", "rtx3090:4"], "'rtx3090:4' is not an option"),
    "nothing": (["--or", " "], "the request is empty"),
    "an open quote": (["--or", "-C 'a"], "has a quote that is not closed"),
    "no value": (["--or", "-c"], "-c needs a value"),
    "a value of a flag": (["--or", "--gpus-linked=x"], "--gpus-linked takes no value"),
    "for each node": (["--gpus-per-node", "a|b"], "has variants, which only -g can name"),
}


@pytest.mark.parametrize(("words", "says"), MISTAKES.values(), ids=MISTAKES)
def test_mistakes_get_a_sentence_and_a_hint(words: list[str], says: str) -> None:
    with pytest.raises(UsageError) as error:
        typed(*words)
    assert says in error.value.message
    assert error.value.hint


SENT = {
    "too many": ([{"gpus": number} for number in range(8)], "9 variants; at most 8"),
    "another field": ([{"gpus": 1, "queue": "x"}], "variant 2 states queue"),
    "nothing": ([{}], "variant 2 states nothing"),
    "no object": ([3], "variants[0] must be a JSON object"),
    "no list": ({"gpus": 1}, "it must be a list of objects"),
    "a wrong amount": ([{"gpus": -2}], "gpus is -2"),
    "the same twice": ([{"gpus": 2}, {"gpus": 2}], "variants 2 and 3 ask for the same"),
    "a contradiction": ([{"gpus": 2}, {"gpus": 2, "gpu_fraction": 0.5}], "variant 3: a fraction of 0.5 refers to one"),
    "variants of variants": ([{"gpus": 2, "variants": []}], "variant 2 states variants"),
}


@pytest.mark.parametrize(("variants", "says"), SENT.values(), ids=SENT)
def test_what_programs_send_is_checked(variants: Any, says: str) -> None:
    with pytest.raises(UsageError) as error:
        read_submission({"argv": ["true"], "gpus": 1, "variants": variants}, None, Settings(), {}, NOW)
    assert says in error.value.message


def test_a_variant_is_as_the_first_in_what_it_does_not_state() -> None:
    wanted = {"argv": ["true"], "gpus": 2, "gpu_type": "a100", "cpus": 4, "mem_mib": 1024, "time_limit_s": 60}
    wanted["variants"] = [{"gpu_fraction": 0.5}, {"cpus_per_gpu": 2}, {"time_limit_s": "unlimited"}]
    (made,) = read_submission(wanted, None, Settings(), {}, NOW).specs
    first, half, cores, forever = each_variant(made)
    assert (half.request.gpus, half.request.gpu_fraction, half.request.gpu_type, half.request.cpus) == (1, 0.5, None, 4)
    assert (cores.request.cpus, cores.request.mem_mib, cores.time_limit_s) == (4.0, 1024, 60)
    assert (forever.time_limit_s, forever.time_limit_source, forever.request) == (None, "unlimited", first.request)
    assert check_fields({"variants": [{"gpus": 1}]}, SPEC_FIELDS)


# --- old tables --------------------------------------------------------------------------------------------


def test_a_row_of_before_has_no_variants_and_a_new_one_keeps_them() -> None:
    made = either(A2, R2, limits=(60, None))
    assert JobReader()._spec(tuple(spec_row(made))) == made
    plain = spec(request=A2)
    row = spec_row(plain)
    assert "variants" not in row[-1]
    assert JobReader()._spec(tuple(row)).variants == ()
    assert decode(encode(made), JobSpec) == made


NAMES = {
    "the GPUs": ((A2, R2), (), ["-g a100:2", "-g rtx3090:2"]),
    "cores beside the same GPUs": ((A1, replace(A1, cpus=4.0)), (), ["-c 1", "-c 4"]),
    "the time alone": ((A1, A1), (3600, None), ["variant 1 (-t 1:00:00)", "variant 2"]),
    "nothing that is shown": ((A1, replace(A1, is_linked=True)), (), ["variant 1", "variant 2"]),
}


@pytest.mark.parametrize(("requests", "limits", "names"), NAMES.values(), ids=NAMES)
def test_variants_are_named_by_what_differs(requests: Any, limits: Any, names: list[str]) -> None:
    assert names_of(either(*requests, limits=limits)) == names


def test_requests_with_equal_demands_are_those_that_look_alike() -> None:
    some = (Request(), Request(cpus=4), Request(1), Request(1, cpus=4), Request(2), Request(1, nodes=2), A1, A2, R1)
    some += (Request(1, gpu_fraction=0.5), Request(1, gpu_fraction=0.5, nodes=2), Request(1, vram_mib=8192))
    some += (Request(1, gpu_type="a100", vram_mib=8192), Request(1, sm_percent=50))
    for one in some:
        for other in some:
            assert (gpu_demand(one) == gpu_demand(other)) is (gpu_request(one) == gpu_request(other)), (one, other)
    jobs = (spec(request=A2), either(A2, R2), either(R2, A2), either(A2, replace(A2, cpus=3)), either(A2, A1))
    for mine in jobs:
        for yours in jobs:
            looks_alike = gpu_requests(mine, is_pending=True) == gpu_requests(yours, is_pending=True)
            assert (gpu_demands(mine) == gpu_demands(yours)) is looks_alike
