"""Ports of gangs: no two open runs that begin on a node have the same one, whatever starts, ends and restarts."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from lab import ANN, Lab

from gpusched.addons.simulate.engine import SimulatedOutcome
from gpusched.daemon.reconcile import adopt_open_runs
from gpusched.lifecycle.master_ports import choose_port, taken_ports
from gpusched.model.commands import Cancel, Selection
from gpusched.model.job import Request, Run
from gpusched.model.settings import ClusterSettings
from gpusched.model.states import JobState, RunState
from gpusched.model.value import replace
from gpusched.testing import job as make_job

PORTS = range(20_000, 20_016)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("start"), st.sampled_from(["n1", "n2"])),
        st.tuples(st.just("end"), st.integers(0, 30)),
        st.tuples(st.just("restart"), st.just(0)),
    ),
    max_size=60,
)


@given(st.sets(st.sampled_from(PORTS)), st.integers(1, 10**6), st.integers(0, 1000))
def test_a_free_port_is_found_as_long_as_there_is_one(taken: set[int], job_id: int, run: int) -> None:
    port = choose_port(PORTS, taken, replace(make_job(job_id), run=run))
    assert (port is None) == (len(taken) == len(PORTS))
    assert port is None or port in set(PORTS) - taken


@given(st.integers(1, 10**6), st.integers(0, 1000))
def test_the_next_run_of_a_job_gets_another_port(job_id: int, run: int) -> None:
    job = make_job(job_id)
    assert choose_port(PORTS, set(), replace(job, run=run)) != choose_port(PORTS, set(), replace(job, run=run + 1))


def test_ports_of_other_nodes_are_not_taken() -> None:
    runs = [Run(1, 1, RunState.RUNNING, node, "b", 0.0, master_port=port) for node, port in (("n1", 1), ("n2", 2))]
    assert taken_ports("n1", [*runs, Run(2, 1, RunState.RUNNING, "n1", "b", 0.0)]) == {1}


@given(STEPS)
def test_no_two_gangs_that_begin_on_a_node_have_the_same_port(steps: list[tuple[str, str | int]]) -> None:
    lab = Lab(
        gpus=1,
        cpus=20,
        more_nodes=("n2", "n3"),
        outcome=SimulatedOutcome(runs_s=1e9),
        cluster=ClusterSettings(master_ports="20000-20015"),
    )
    for kind, what in steps:
        if kind == "start":
            lab.submit(request=Request(nodes=2, cpus=1, nodelist=(str(what), "n3")))
        elif kind == "end" and (open_runs := sorted(lab.scheduler.state.open_runs)):
            job = int(open_runs[int(what) % len(open_runs)].partition(".")[0])
            lab.ask(Cancel(ANN, Selection(ids=(job,))))
        elif kind == "restart":
            lab.restart()
            adopt_open_runs(lab.scheduler.state, lab.scheduler.engine, lab.settings)
        lab.tick(1)
        runs = list(lab.scheduler.state.open_runs.values())
        assert all(run.master_port in PORTS for run in runs)
        places = [(run.node, run.master_port) for run in runs]
        assert len(places) == len(set(places))


def test_a_gang_waits_when_all_ports_of_its_node_are_reserved() -> None:
    lab = Lab(gpus=1, cpus=20, more_nodes=("n2",), cluster=ClusterSettings(master_ports="20000-20015"))
    jobs = [lab.submit(request=Request(nodes=2, cpus=1)) for _ in range(17)]
    assert len(lab.scheduler.state.open_runs) == 16
    (failure,) = lab.scheduler.failures.failing
    assert failure.error == ("job 17 has to wait: all 16 ports of [cluster] master_ports are reserved on n1")
    for _ in range(30):
        lab.tick(1)
    assert lab.job(jobs[-1]).state is JobState.COMPLETED
    assert not lab.scheduler.failures.failing
