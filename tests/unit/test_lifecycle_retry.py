"""Which failures are tried again, and when."""

from __future__ import annotations

import subprocess
import sys

import pytest

from gpusched.lifecycle.retry import CLASSES, Failure, backoff_s, failure_of, parse_retry_on, wants_retry
from gpusched.model.job import RetryRule, Run
from gpusched.model.states import JobState, ReasonCode, RunState
from gpusched.model.value import replace

RUN = Run(7, 1, RunState.ENDED, "n1", "boot", 0.0)

FAILURES = {
    "completed": ({"outcome": JobState.COMPLETED, "exit_code": 0}, None),
    "cancelled": ({"outcome": JobState.CANCELLED, "signal": 15}, None),
    "preempted": ({"outcome": JobState.PREEMPTED, "signal": 15}, None),
    "exit code": ({"outcome": JobState.FAILED, "exit_code": 3}, Failure("exit", 3)),
    "signal": ({"outcome": JobState.FAILED, "signal": 11}, Failure("signal", None, 11)),
    "launch": ({"outcome": JobState.FAILED, "reason": ReasonCode.JOB_LAUNCH_FAILURE}, Failure("launch")),
    "timeout": ({"outcome": JobState.TIMEOUT, "exit_code": 0}, Failure("timeout", 0)),
    "oom": ({"outcome": JobState.OUT_OF_MEMORY, "exit_code": 1}, Failure("oom", 1)),
    "lost": ({"outcome": JobState.NODE_FAIL}, Failure("node_fail")),
    "open": ({}, None),
}


@pytest.mark.parametrize(("fields", "failure"), FAILURES.values(), ids=FAILURES)
def test_failures_are_classified(fields, failure):
    assert failure_of(replace(RUN, **fields)) == failure


WANTS = {
    "its own class": (("exit",), Failure("exit", 1), True),
    "another class": (("signal",), Failure("exit", 1), False),
    "nothing at all": ((), Failure("exit", 1), False),
    "a code that is named": (("3",), Failure("exit", 3), True),
    "a code that is not": (("3",), Failure("exit", 4), False),
    "the lower end of a range": (("10-20",), Failure("exit", 10), True),
    "the upper end of a range": (("10-20",), Failure("exit", 20), True),
    "above a range": (("10-20",), Failure("exit", 21), False),
    "a signal that is named": (("SIGSEGV",), Failure("signal", None, 11), True),
    "another signal": (("SIGSEGV",), Failure("signal", None, 9), False),
    "a signal as a shell reports it": (("SIGSEGV",), Failure("exit", 139), True),
    "a code does not match a signal": (("11",), Failure("signal", None, 11), False),
    "GPU memory that ran out": (("oom",), Failure("oom", 1), True),
    "GPU memory that ran out, by its exit code": (("1",), Failure("oom", 1), True),
    "GPU memory that ran out is not class exit": (("exit",), Failure("oom", 1), False),
    "a time limit": (("timeout",), Failure("timeout", 0), True),
    "a time limit is not the signal that enforced it": (("SIGTERM",), Failure("timeout", None, 15), False),
    "a time limit is not an exit code either": (("1-255",), Failure("timeout", 143), False),
    "a lost machine": (("node_fail",), Failure("node_fail"), True),
    "a command that cannot be started": (CLASSES, Failure("launch"), False),
}


@pytest.mark.parametrize(("retry_on", "failure", "wanted"), WANTS.values(), ids=WANTS)
def test_a_rule_matches(retry_on, failure, wanted):
    assert wants_retry(RetryRule(retry_on=retry_on), failure) is wanted


READABLE = {
    "exit": ("exit",),
    "exit,signal": ("exit", "signal"),
    " exit , oom ": ("exit", "oom"),
    "EXIT": ("exit",),
    "fail": ("exit", "signal", "oom"),
    "all": ("exit", "signal", "oom", "timeout", "node_fail"),
    "all,exit": ("exit", "signal", "oom", "timeout", "node_fail"),
    "3": ("3",),
    "003": ("3",),
    "10-20": ("10-20",),
    "7-7": ("7",),
    "1-255": ("1-255",),
    "1": ("1",),
    "255": ("255",),
    "SIGSEGV": ("SIGSEGV",),
    "segv": ("SIGSEGV",),
    "sigkill,3,timeout": ("SIGKILL", "3", "timeout"),
}


@pytest.mark.parametrize(("text", "words"), READABLE.items())
def test_retry_on_is_parsed(text, words):
    assert parse_retry_on(text) == words
    assert parse_retry_on(",".join(words)) == words


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", "''"),
        ("exit,", "''"),
        ("crash", "'crash'"),
        ("0", "'0'"),
        ("256", "'256'"),
        ("20-10", "'20-10'"),
        ("0-5", "'0-5'"),
        ("-5", "'-5'"),
        ("3-", "'3-'"),
        ("1.5", "'1.5'"),
        ("SIGNONE", "'SIGNONE'"),
        ("٣", "'٣'"),
        ("exit signal", "'exit signal'"),
        ("9999999999999999999", "'9999999999999999999'"),
        ("launch", "'launch'"),
    ],
)
def test_an_unreadable_retry_on_is_quoted(text, part):
    with pytest.raises(ValueError, match="exit codes|exit, signal, oom") as error:
        parse_retry_on(text)
    assert str(error.value).startswith(part)


RULE = RetryRule(backoff_s=10.0, backoff_factor=2.0, backoff_max_s=600.0)


@pytest.mark.parametrize(("attempt", "middle"), [(1, 10), (2, 20), (3, 40), (6, 320), (7, 600), (5000, 600)])
def test_the_backoff_doubles_up_to_its_maximum(attempt, middle):
    waits = [backoff_s(RULE, attempt, job_id) for job_id in range(1, 400)]
    assert all(0.75 * middle <= wait <= 1.25 * middle for wait in waits)
    assert min(waits) < 0.8 * middle
    assert max(waits) > 1.2 * middle


def test_the_backoff_depends_on_job_and_attempt_alone():
    assert backoff_s(RULE, 1, 7) == backoff_s(RULE, 1, 7)
    assert backoff_s(RULE, 1, 7) != backoff_s(RULE, 1, 8)
    assert backoff_s(RULE, 2, 7) != 2 * backoff_s(RULE, 1, 7)


def test_the_backoff_is_the_same_in_every_process():
    """A restarted daemon must find the instant that it promised; the built-in hash would not."""
    code = "from gpusched.model.job import RetryRule; from gpusched.lifecycle.retry import backoff_s; "
    code += "print(repr(backoff_s(RetryRule(backoff_s=10.0), 3, 41)))"
    values = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert values == {f"{backoff_s(RetryRule(backoff_s=10.0), 3, 41)!r}\n"}
    assert backoff_s(RetryRule(backoff_s=10.0), 3, 41) == pytest.approx(41.44734679555289)


@pytest.mark.parametrize(
    "rule",
    [
        RetryRule(backoff_s=0.0),
        RetryRule(backoff_max_s=0.0),
        RetryRule(backoff_s=0.0, backoff_factor=0.0),
        RetryRule(backoff_max_s=-1.0),
    ],
)
def test_a_zero_backoff_does_not_wait(rule):
    assert backoff_s(rule, 1, 7) == 0.0
    assert backoff_s(rule, 100, 7) == 0.0


def test_a_factor_of_one_keeps_the_backoff_and_a_smaller_one_shrinks_it():
    steady = RetryRule(backoff_s=10.0, backoff_factor=1.0)
    assert 7.5 <= backoff_s(steady, 1000, 7) <= 12.5
    shrinking = RetryRule(backoff_s=10.0, backoff_factor=0.5)
    assert backoff_s(shrinking, 10, 7) < 0.03
