"""gpusched.Executor: what CPython's documentation says of executors, and what becomes of killed jobs."""

from __future__ import annotations

import concurrent.futures as cf
import functools
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import calls
import pytest
from harness import Daemon
from support import wait_until

import gpusched
from gpusched.addons.executor.folder import CallFolder, InitializerFailed
from gpusched.errors import JobFailed, NotReady, Refused, UsageError


@pytest.fixture
def make(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., gpusched.Executor]]:
    """Makes executors on a daemon of the test's own, which are shut down at the end."""
    for name in ("GPUSCHED_SOCKET", "GPUSCHED_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("GPUSCHED_HOME", str(daemon.home))
    made: list[gpusched.Executor] = []

    def new(**options: Any) -> gpusched.Executor:
        made.append(gpusched.Executor(**{"cpus": 0, "chdir": daemon.home, **options}))
        return made[-1]

    yield new
    for executor in made:
        executor.shutdown(wait=False, cancel_futures=True)
    if daemon.process is not None:
        daemon.call("POST", "/v1/jobs/cancel", {"all": True})
    for executor in made:
        executor.shutdown()
    # An executor that was told not to wait may still be saying good-bye.
    wait_until(lambda: not any(one.name.startswith("gpusched-") for one in threading.enumerate()), what="its threads")


Make = Callable[..., gpusched.Executor]


def job_of(future: gpusched.CallFuture[Any]) -> str:
    wait_until(lambda: future.job_id, what="the job to be submitted")
    assert future.job_id is not None
    return future.job_id


# --- results and exceptions -------------------------------------------------------------------------


def test_a_call_returns_its_result(make: Make) -> None:
    future = make().submit(calls.add, 2, other=3)
    assert future.result(timeout=60) == 5
    assert future.exception() is None
    assert (future.done(), future.running(), future.cancelled()) == (True, False, False)


def test_an_exception_is_raised_by_result_with_its_traceback_as_cause(make: Make) -> None:
    future = make().submit(calls.fail, "because")
    with pytest.raises(ValueError, match="because") as caught:
        future.result(timeout=60)
    assert future.exception() is caught.value
    assert "in fail\n    raise ValueError(text)" in str(caught.value.__cause__)


def test_system_exit_is_an_exception_of_the_call(make: Make) -> None:
    with pytest.raises(SystemExit):
        make().submit(calls.leave).result(timeout=60)


def test_an_unpicklable_exception_is_described_in_words(make: Make) -> None:
    with pytest.raises(JobFailed, match=r"raised calls.Unpicklable: cannot be made again") as caught:
        make().submit(calls.raise_unpicklable).result(timeout=60)
    assert "in raise_unpicklable" in str(caught.value.__cause__)


def test_an_unpicklable_call_is_an_exception_of_the_future(make: Make) -> None:
    executor = make()
    lock = executor.submit(calls.square, threading.Lock())  # type: ignore[arg-type]  # that is the point
    assert isinstance(lock.exception(timeout=60), TypeError)
    assert "return_unpicklable" in str(executor.submit(calls.return_unpicklable).exception(timeout=60))


def test_result_and_exception_time_out_and_the_call_continues(make: Make, tmp_path: Path) -> None:
    future = make().submit(calls.wait_for, str(tmp_path / "go"))
    for ask in (future.result, future.exception):
        with pytest.raises(cf.TimeoutError):
            ask(timeout=0.01)
    (tmp_path / "go").touch()
    assert future.result(timeout=60)


# --- cancelling ---------------------------------------------------------------------------------------


def test_a_pending_call_can_be_cancelled(make: Make, daemon: Daemon) -> None:
    future = make(hold=True).submit(calls.square, 2)
    assert future.cancel()
    assert (future.cancelled(), future.done(), future.running()) == (True, True, False)
    for ask in (future.result, future.exception):
        with pytest.raises(cf.CancelledError):
            ask(timeout=60)
    wait_until(lambda: not daemon.call("GET", "/v1/jobs")["jobs"], what="the job to be gone")
    assert future.cancel()


def test_a_running_or_finished_call_cannot_be_cancelled(make: Make, tmp_path: Path) -> None:
    future = make().submit(calls.wait_for, str(tmp_path / "go"))
    wait_until(future.running, what="the call to run")
    assert not future.cancel()
    (tmp_path / "go").touch()
    assert future.result(timeout=60)
    assert not future.cancel()
    assert not future.cancelled()


def test_a_running_job_is_not_cancelled_when_its_state_was_not_queried(
    make: Make, tmp_path: Path, daemon: Daemon
) -> None:
    future = make().submit(calls.wait_for, str(tmp_path / "go"))
    daemon.wait_state(job_of(future), "RUNNING")
    assert not future.cancel()
    (tmp_path / "go").touch()
    assert future.result(timeout=60)


@pytest.fixture
def told_first(monkeypatch: pytest.MonkeyPatch) -> list[BaseException]:
    """The first request to cancel is answered when the thread that watches has dealt with the ends of its jobs.

    For that it must have something else to watch. What is put into the list is raised in place of the answer.
    """
    call = gpusched.Client.call
    ended: set[str] = set()
    dealt_with: set[str] = set()
    errors: list[BaseException] = []
    first = iter([True])

    def late(client: gpusched.Client, method: str, path: str, body: Any = None) -> dict[str, Any]:
        if path.startswith("/v1/ended?after"):
            dealt_with.update(ended)
        answer = call(client, method, path, body)
        if path.startswith("/v1/ended?after"):
            ended.update(job["id"] for job in answer["jobs"])
        elif path == "/v1/jobs/cancel" and next(first, False):
            wait_until(lambda: dealt_with.issuperset(map(str, answer["cancelled"])), what="the ends to be told")
            if errors:
                raise errors.pop()
        return answer

    monkeypatch.setattr(gpusched.Client, "call", late)
    return errors


def test_cancel_calls_the_callbacks_even_when_the_end_arrives_first(
    make: Make, told_first: list[BaseException]
) -> None:
    """As in the standard library; another thread would still be calling them when `cancel` returns."""
    executor = make(hold=True)
    future, other = executor.submit(calls.square, 3), executor.submit(calls.square, 4)
    job_of(future), job_of(other)
    seen: list[threading.Thread] = []
    future.add_done_callback(lambda done: seen.append(threading.current_thread()))
    assert future.cancel()
    assert seen == [threading.current_thread()]
    assert not other.done()


def test_an_unanswered_cancel_succeeds_when_the_job_ended_cancelled(
    make: Make, told_first: list[BaseException]
) -> None:
    executor = make(hold=True)
    future, other = executor.submit(calls.square, 3), executor.submit(calls.square, 4)
    job_of(future), job_of(other)
    told_first.append(NotReady("the daemon went away"))
    with pytest.raises(NotReady):
        future.cancel()
    assert future.cancelled()
    assert not other.done()


def test_two_threads_cancelling_a_call_both_succeed(make: Make, told_first: list[BaseException]) -> None:
    executor = make(hold=True)
    future, other = executor.submit(calls.square, 3), executor.submit(calls.square, 4)
    job_of(future), job_of(other)
    seen: list[bool] = []
    future.add_done_callback(lambda done: seen.append(done.cancelled()))
    with cf.ThreadPoolExecutor(2) as pool:
        assert [asked.result(timeout=60) for asked in [pool.submit(future.cancel) for _ in range(2)]] == [True, True]
    assert seen == [True]


def test_a_callback_may_shut_down_its_executor(make: Make) -> None:
    """It waits for the others, which must be cancelled by then."""
    executor = make(hold=True, max_workers=2)
    futures = [executor.submit(calls.square, n) for n in range(4)]
    job_of(futures[0]), job_of(futures[1])
    for future in futures:
        future.add_done_callback(lambda done: executor.shutdown())
    executor.shutdown(cancel_futures=True)
    assert all(future.cancelled() for future in futures)


def test_a_callback_of_a_refused_call_may_cancel_others(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would wait half a minute for the thread that it is in to send them."""
    executor = make(gpus=64)
    call, posts = gpusched.Client.call, threading.Event()

    def late(client: gpusched.Client, method: str, path: str, body: Any = None) -> dict[str, Any]:
        if "batch" in (body or {}):
            assert posts.wait(30)
        return call(client, method, path, body)

    monkeypatch.setattr(gpusched.Client, "call", late)
    executor.submit(calls.square, 0)
    wait_until(lambda: executor._dispatch._sending, what="one to be on its way")
    # These go together, in a request for each function: the first is refused before the second is sent.
    futures = [executor.submit(function, n) for n in range(2) for function in (calls.square, calls.add)]
    for future in futures:
        others = [other for other in futures if other is not future]
        future.add_done_callback(lambda done, others=others: [other.cancel() for other in others])  # type: ignore[misc]
    waited = threading.Condition.wait_for
    limits: list[float | None] = []

    def noted(self: threading.Condition, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        if threading.current_thread().name == "gpusched-submit" and not predicate():
            limits.append(timeout)
            return False
        return waited(self, predicate, timeout)

    monkeypatch.setattr(threading.Condition, "wait_for", noted)
    posts.set()
    assert all(isinstance(future.exception(timeout=60), Refused) for future in futures)
    assert limits == []


# --- callbacks ----------------------------------------------------------------------------------------


def test_callbacks_run_in_order_and_at_once_when_finished(make: Make) -> None:
    future = make().submit(calls.square, 3)
    seen: list[Any] = []
    future.add_done_callback(lambda done: seen.append((1, done.result())))
    future.add_done_callback(lambda done: seen.append((2, done.result())))
    assert future.result(timeout=60) == 9
    wait_until(lambda: len(seen) == 2, what="both callbacks")
    future.add_done_callback(lambda done: seen.append(3))
    assert seen == [(1, 9), (2, 9), 3]


def test_a_callback_that_raises_is_logged_and_the_others_are_called(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    future = make(hold=True).submit(calls.square, 3)
    seen: list[bool] = []
    future.add_done_callback(lambda done: 1 / 0)  # type: ignore[arg-type, return-value]
    future.add_done_callback(lambda done: seen.append(done.cancelled()))
    assert future.cancel()
    assert seen == [True]
    assert "exception calling callback" in caplog.text


# --- map ----------------------------------------------------------------------------------------------


def test_map_yields_results_in_order_up_to_the_shortest_iterable(make: Make) -> None:
    executor = make()
    assert list(executor.map(calls.add, range(5), [10, 20, 30])) == [10, 21, 32]
    assert list(executor.map(calls.square, range(23), chunksize=5)) == [n * n for n in range(23)]
    assert list(executor.map(calls.square, [])) == []


def test_map_raises_in_place_of_the_value(make: Make) -> None:
    found = make().map(calls.fail, ["a", "b"])
    with pytest.raises(ValueError, match="a"):
        next(found)


def test_map_consumes_its_iterables_at_once(make: Make) -> None:
    taken: list[int] = []
    make(hold=True).map(calls.square, (taken.append(n) or n for n in range(4)))  # type: ignore[func-returns-value]
    assert taken == [0, 1, 2, 3]


def test_map_times_out(make: Make) -> None:
    with pytest.raises(cf.TimeoutError):
        list(make(hold=True).map(calls.square, [1], timeout=0.1))


@pytest.mark.parametrize("options", [{}, {"chunksize": 3}])
def test_the_rest_of_a_map_is_cancelled_in_one_request(
    make: Make, daemon: Daemon, monkeypatch: pytest.MonkeyPatch, options: dict[str, int]
) -> None:
    """One for each call would take a minute for ten thousand of them."""
    asked: list[str] = []
    call = gpusched.Client.call

    def noted(client: gpusched.Client, method: str, path: str, body: Any = None) -> dict[str, Any]:
        asked.append(path)
        return call(client, method, path, body)

    monkeypatch.setattr(gpusched.Client, "call", noted)
    results = make(hold=True).map(calls.square, range(40), timeout=0.5, **options)
    wait_until(lambda: daemon.call("GET", "/v1/jobs")["jobs"], what="the jobs")
    with pytest.raises(cf.TimeoutError):
        next(results)
    wait_until(lambda: not daemon.call("GET", "/v1/jobs")["jobs"], what="all of them to be cancelled")
    assert asked.count("/v1/jobs/cancel") == 1


def test_leaving_a_map_early_cancels_the_rest(make: Make, daemon: Daemon, tmp_path: Path) -> None:
    paths = [str(tmp_path / name) for name in "abc"]
    (tmp_path / "a").touch()
    for _ in make(max_workers=1).map(calls.wait_for, paths):
        break
    (tmp_path / "b").touch()
    wait_until(lambda: not daemon.call("GET", "/v1/jobs")["jobs"], what="the rest to end")
    assert len(daemon.call("GET", "/v1/jobs?states=all")["jobs"]) <= 2


# --- initializers -------------------------------------------------------------------------------------


def test_each_job_is_initialized_once_before_its_calls(make: Make) -> None:
    executor = make(initializer=calls.set_up, initargs=(3, 4))
    assert executor.submit(calls.setting).result(timeout=60) == [7]
    assert list(executor.map(calls.multiplied, range(5), chunksize=5)) == [0, 7, 14, 21, 28]


def test_an_initializer_that_raises_breaks_the_executor(make: Make, tmp_path: Path, daemon: Daemon) -> None:
    executor = make(initializer=calls.fail_set_up, initargs=(str(tmp_path / "broken"),), max_workers=2)
    assert executor.submit(calls.square, 3).result(timeout=60) == 9
    runs = executor.submit(calls.begin_and_wait_for, str(tmp_path / "go"))
    wait_until((tmp_path / "go.begun").exists, what="the call to begin")
    (tmp_path / "broken").touch()
    waits = [executor.submit(calls.square, n) for n in range(4)]
    for future in waits:
        with pytest.raises(cf.BrokenExecutor, match="the initializer failed in job .*: OSError: no licence") as caught:
            future.result(timeout=60)
        assert "in fail_set_up" in str(caught.value.__cause__)
    with pytest.raises(cf.BrokenExecutor, match="no call can be made: the initializer failed"):
        executor.submit(calls.square, 1)
    (tmp_path / "go").touch()
    assert runs.result(timeout=60), "what runs goes on"
    executor.shutdown()


def test_pending_jobs_of_a_broken_initializer_are_cancelled(make: Make, tmp_path: Path, daemon: Daemon) -> None:
    (tmp_path / "broken").touch()
    executor = make(initializer=calls.fail_set_up, initargs=(str(tmp_path / "broken"),), hold=True)
    futures = [executor.submit(calls.square, n) for n in range(3)]
    ids = [job_of(future) for future in futures]
    daemon.call("POST", "/v1/jobs/release", {"ids": [ids[0]]})
    for future in futures:
        assert isinstance(future.exception(timeout=60), cf.BrokenExecutor)
    assert [daemon.job(job_id)["state"] for job_id in ids] == ["FAILED", "CANCELLED", "CANCELLED"]


def test_a_broken_initializer_found_by_one_thread_cancels_despite_the_other(
    make: Make, daemon: Daemon, tmp_path: Path, told_first: list[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One job ends before its submission is answered; the cancelled ends of the others are told before that is."""
    executor = make(initializer=calls.fail_set_up, initargs=(str(tmp_path / "broken"),), hold=True)
    other = executor.submit(calls.begin_and_wait_for, str(tmp_path / "go"))
    daemon.call("POST", "/v1/jobs/release", {"ids": [job_of(other)]})
    wait_until((tmp_path / "go.begun").exists, what="the call to begin")
    (tmp_path / "broken").touch()
    call = gpusched.Client.call

    def late(client: gpusched.Client, method: str, path: str, body: Any = None) -> dict[str, Any]:
        answer = call(client, method, path, body)
        if "batch" in (body or {}) and len(body["batch"]) > 1:
            call(client, "POST", "/v1/jobs/release", {"ids": answer["ids"][:1]})
            first = str(answer["ids"][0])
            wait_until(lambda: first in executor._dispatch._early, what="the first of them to end")
        return answer

    monkeypatch.setattr(gpusched.Client, "call", late)
    with executor._dispatch._lock:  # so that they go together
        futures = [executor.submit(calls.square, n) for n in range(3)]
    assert [type(future.exception(timeout=60)) for future in futures] == [InitializerFailed] * 3
    (tmp_path / "go").touch()
    assert other.result(timeout=60), "what runs goes on"


def test_an_invalid_initializer_is_refused(make: Make, daemon: Daemon) -> None:
    with pytest.raises(TypeError, match="initializer must be a callable"):
        make(initializer=3)
    with pytest.raises((TypeError, AttributeError), match="pickle"):
        make(initializer=calls.set_up, initargs=(threading.Lock(),))
    assert list((daemon.home / "calls").iterdir()) == []


def test_a_chunk_size_below_one_is_refused(make: Make) -> None:
    with pytest.raises(ValueError, match="chunksize must be >= 1"):
        make().map(calls.square, [1], chunksize=0)


# --- waiting for many ---------------------------------------------------------------------------------


def test_wait_and_as_completed_of_the_standard_library_work(make: Make, tmp_path: Path) -> None:
    executor = make()
    slow = executor.submit(calls.wait_for, str(tmp_path / "go"))
    quick, wrong = executor.submit(calls.square, 2), executor.submit(calls.fail)
    assert cf.wait([slow, quick], return_when=cf.FIRST_COMPLETED, timeout=60).done == {quick}
    assert wrong in cf.wait([slow, wrong], return_when=cf.FIRST_EXCEPTION, timeout=60).done
    assert cf.wait([slow], timeout=0.01).not_done == {slow}
    first = next(cf.as_completed([slow, quick, quick], timeout=60))
    assert first is quick
    with pytest.raises(cf.TimeoutError):
        list(cf.as_completed([slow], timeout=0.01))
    (tmp_path / "go").touch()
    assert set(cf.as_completed([slow, quick, quick, wrong], timeout=60)) == {slow, quick, wrong}


def test_as_completed_yields_cancelled_calls(make: Make) -> None:
    future = make(hold=True).submit(calls.square, 2)
    threading.Timer(0.05, future.cancel).start()
    assert list(cf.as_completed([future], timeout=60)) == [future]


# --- shutting down ------------------------------------------------------------------------------------


def test_leaving_the_with_block_waits_and_then_refuses_calls(make: Make) -> None:
    with make() as executor:
        future = executor.submit(calls.square, 4)
    assert future.done()
    with pytest.raises(RuntimeError, match="cannot schedule new futures after shutdown"):
        executor.submit(calls.square, 4)


def test_ctrl_c_cancels_calls_that_have_not_started(make: Make, tmp_path: Path) -> None:
    """Leaving the block would otherwise wait for thousands of calls that nobody wants any more."""
    executor = make(max_workers=1)
    with pytest.raises(KeyboardInterrupt), executor:
        runs = executor.submit(calls.begin_and_wait_for, str(tmp_path / "go"))
        waits = [executor.submit(calls.square, n) for n in range(3)]
        wait_until((tmp_path / "go.begun").exists, what="the call to begin")
        threading.Timer(0.5, (tmp_path / "go").touch).start()
        raise KeyboardInterrupt
    assert runs.result() == str(tmp_path / "go")
    assert all(future.cancelled() for future in waits)


def test_shutdown_without_waiting_returns_and_calls_continue(make: Make, tmp_path: Path) -> None:
    executor = make()
    future = executor.submit(calls.wait_for, str(tmp_path / "go"))
    executor.shutdown(wait=False)
    assert not future.done()
    (tmp_path / "go").touch()
    assert future.result(timeout=60)


def test_shutdown_cancels_pending_calls_and_finishes_running_ones(make: Make, tmp_path: Path, daemon: Daemon) -> None:
    executor = make(max_workers=1)
    running = executor.submit(calls.wait_for, str(tmp_path / "go"))
    waiting = [executor.submit(calls.square, n) for n in range(3)]
    daemon.wait_state(job_of(running), "RUNNING")
    executor.shutdown(wait=False, cancel_futures=True)
    assert all(future.cancelled() for future in waiting)
    assert not running.cancelled()
    (tmp_path / "go").touch()
    assert running.result(timeout=60)


def test_a_successful_executor_leaves_no_files(make: Make, daemon: Daemon) -> None:
    with make() as executor:
        assert sum(executor.map(calls.square, range(4))) == 14
    assert os.listdir(daemon.home / "calls") == []


def test_shutdown_waits_for_its_files_to_be_removed(
    make: Make, daemon: Daemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that watches has been told to end by an earlier call, and removes them."""
    entered, may_go = threading.Event(), threading.Event()
    forget_log = CallFolder.forget_log

    def slowly(folder: CallFolder, job_id: str) -> None:
        entered.set()
        assert may_go.wait(30)
        forget_log(folder, job_id)

    monkeypatch.setattr(CallFolder, "forget_log", slowly)
    executor = make()
    future = executor.submit(calls.wait_for, str(tmp_path / "go"))
    executor.shutdown(wait=False)
    (tmp_path / "go").touch()
    assert future.result(timeout=60)
    assert entered.wait(30)
    with cf.ThreadPoolExecutor(1) as pool:
        found = pool.submit(lambda: (executor.shutdown(), os.listdir(daemon.home / "calls")))
        cf.wait([found], timeout=0.2)
        may_go.set()
        assert found.result(timeout=60) == (None, [])


def test_the_output_of_a_failed_call_is_kept(make: Make, daemon: Daemon) -> None:
    with make() as executor:
        future = executor.submit(calls.fail, "see the log")
    with gpusched.Client() as client:
        assert "see the log" in "".join(client.logs(job_of(future)))


# --- jobs -----------------------------------------------------------------------------------------------


def test_workers_do_not_exceed_the_requested_number(make: Make, tmp_path: Path, daemon: Daemon) -> None:
    executor = make(max_workers=2)
    futures = [executor.submit(calls.wait_for, str(tmp_path / f"go{n}")) for n in range(4)]
    # The daemon knows of a job a moment before its future does.
    wait_until(lambda: [future.job_id is not None for future in futures] == [True, True, False, False], what="two jobs")
    assert len(daemon.call("GET", "/v1/jobs")["jobs"]) == 2
    for n in range(4):
        (tmp_path / f"go{n}").touch()
    assert len({future.result(timeout=60) for future in futures}) == 4
    with pytest.raises(ValueError, match="max_workers"):
        make(max_workers=0)


def test_a_job_that_dies_reports_how(make: Make) -> None:
    future = make().submit(calls.die)
    with pytest.raises(JobFailed, match=r"the call of die, is FAILED: .*signal 9.*no result") as caught:
        future.result(timeout=60)
    assert (caught.value.job_id, caught.value.state, caught.value.job_signal) == (future.job_id, "FAILED", 9)
    assert caught.value.hint == f"see its output with: glogs {future.job_id}"


def test_a_cancelled_job_is_a_failure_of_the_call(make: Make, tmp_path: Path) -> None:
    future = make().submit(calls.wait_for, str(tmp_path / "never"))
    wait_until(future.running, what="the call to run")
    with gpusched.Client() as client:
        client.cancel(job_of(future))
    with pytest.raises(JobFailed, match="CANCELLED"):
        future.result(timeout=60)
    assert not future.cancelled()


def test_a_refused_submission_is_an_exception_of_the_call(make: Make) -> None:
    with pytest.raises(Refused, match="GPU"):
        make(gpus=64).submit(calls.square, 1).result(timeout=60)
    with pytest.raises(UsageError, match="key"):
        make(key="k")


def test_a_call_is_retried_and_the_last_attempt_counts(make: Make, tmp_path: Path) -> None:
    executor = make(retries=2, backoff=0)
    assert executor.submit(calls.fail_until, str(tmp_path / "a"), 2).result(timeout=60) == 3
    with pytest.raises(OSError, match="attempt 3"):
        executor.submit(calls.fail_until, str(tmp_path / "b"), 9).result(timeout=60)


def test_leftovers_of_an_earlier_attempt_are_not_the_result(make: Make, tmp_path: Path) -> None:
    with pytest.raises(JobFailed, match="signal 9"):
        make(retries=1, backoff=0).submit(calls.fail_then_die, str(tmp_path / "a")).result(timeout=60)


def test_calls_of_several_functions_need_few_requests(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    call = gpusched.Client.call

    def noted(client: gpusched.Client, method: str, path: str, body: Any = None) -> dict[str, Any]:
        if "batch" in (body or {}):
            asked.append(len(body["batch"]))
        return call(client, method, path, body)

    monkeypatch.setattr(gpusched.Client, "call", noted)
    executor = make(hold=True)
    futures = [executor.submit(calls.square if n % 2 else calls.add, n) for n in range(200)]
    for future in futures:
        job_of(future)
    assert sum(asked) == 200
    # The first ones go as they come.
    assert len(asked) < 50


def test_a_failing_watcher_leaves_no_future_pending(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever goes wrong there, as with a daemon of another release."""
    call = gpusched.Client.call

    def odd(client: gpusched.Client, method: str, path: str, body: Any = None) -> dict[str, Any]:
        return {} if path.startswith("/v1/ended?after") else call(client, method, path, body)

    monkeypatch.setattr(gpusched.Client, "call", odd)
    assert isinstance(make(hold=True).submit(calls.square, 1).exception(timeout=60), KeyError)


def test_calls_survive_a_daemon_kill(make: Make, daemon: Daemon, tmp_path: Path) -> None:
    # Else the executor may be quicker to start the next daemon than the test is.
    client = gpusched.Client(autostart=False)
    executor = make(client=client)
    futures = [executor.submit(calls.wait_for, str(tmp_path / "go")) for _ in range(3)]
    for future in futures:
        daemon.wait_state(job_of(future), "RUNNING")
    daemon.kill()
    (tmp_path / "go").touch()
    daemon.start()
    later = executor.submit(calls.square, 5)
    assert len({future.result(timeout=60) for future in futures}) == 1
    assert later.result(timeout=60) == 25
    executor.shutdown()
    client.close()


def test_options_match_those_of_jobs(make: Make, daemon: Daemon) -> None:
    executor = make(extra_env={"SEEN": "yes"}, time="5m", name="mine")
    future = executor.submit(calls.environment, "SEEN")
    assert future.result(timeout=60) == "yes"
    job = daemon.job(job_of(future))
    assert (job["name"], job["time_limit_s"]) == ("mine", 300)


SCRIPT = """
import dataclasses, gpusched
@dataclasses.dataclass
class Point:
    x: int
def double(point): return Point(point.x * 2)
print("top")
if __name__ == "__main__":
    with gpusched.Executor(cpus=0) as executor:
        print(executor.submit(double, Point(4)).result(timeout=60) == Point(8))
"""


def test_functions_and_classes_of_a_script_round_trip(daemon: Daemon, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "script.py"], env=daemon.env, cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "top\nTrue\n", "")


def test_a_program_without_shutdown_ends_after_its_calls(daemon: Daemon, tmp_path: Path) -> None:
    code = (
        "import gpusched, math; f = gpusched.Executor(cpus=0).submit(math.sqrt, 16)\n"
        "f.add_done_callback(lambda f: print(f.result()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=daemon.env, cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "4.0\n", "")


UNGUARDED = """
import gpusched
def double(x): return 2 * x
print("top")
{before}
with gpusched.Executor(cpus=0) as executor:
    print(executor.submit(double, 4).exception(timeout=60))
"""


@pytest.mark.parametrize("before", ["", 'gpusched.Client().submit("true", output="/dev/null", cpus=0)'])
def test_a_script_without_a_main_guard_is_refused_with_an_explanation(
    daemon: Daemon, tmp_path: Path, before: str
) -> None:
    (tmp_path / "script.py").write_text(UNGUARDED.format(before=before))
    done = subprocess.run(
        [sys.executable, "script.py"], env=daemon.env, cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("top\nthis program submits jobs whenever it is imported")
    assert 'put what submits under: if __name__ == "__main__":' in done.stdout
    wait_until(lambda: not daemon.call("GET", "/v1/jobs")["jobs"], what="all jobs to end")
    assert len(daemon.call("GET", "/v1/jobs?states=all")["jobs"]) == (2 if before else 1)


NESTED = """
import gpusched, math
def inner(): return gpusched.Client().submit("true", output="/dev/null", cpus=0).name
if __name__ == "__main__":
    with gpusched.Executor(cpus=0) as executor:
        print(executor.submit(inner).result(timeout=60))
"""


def test_a_call_may_submit_jobs(daemon: Daemon, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(NESTED)
    done = subprocess.run(
        [sys.executable, "script.py"], env=daemon.env, cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "wrap\n", "")


WAYS_OUT = ("put it into a module, or let lambdas", "-m pip install 'cloudpickle>=")


def test_objects_defined_at_a_prompt_are_refused_with_an_alternative(daemon: Daemon, tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['cloudpickle'] = None\n"
        "import gpusched\ndef f(): pass\nprint(gpusched.Executor(cpus=0).submit(f).exception())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=daemon.env, cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert all(way in done.stdout for way in WAYS_OUT), done


def test_lambdas_and_closures_are_refused_with_the_extra_they_need(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    number = 3
    executor = make()
    for call in (lambda: 1, lambda: number, functools.partial(lambda x: x, 1)):
        error = executor.submit(call).exception(timeout=60)
        assert isinstance(error, pickle.PicklingError)
        assert all(way in str(error) for way in WAYS_OUT)


def test_lambdas_and_closures_travel_by_cloudpickle(make: Make) -> None:
    pytest.importorskip("cloudpickle")
    number = 3
    executor = make()
    assert executor.submit(lambda: number + 1).result(timeout=60) == 4
    assert list(executor.map(lambda x: x * number, [1, 2], chunksize=2)) == [3, 6]
