"""Events are JSON and fit one atomic write; tickets come through the socket in whatever pieces."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpusched.engine.event_pipe import RunRefused, event_of
from gpusched.engine.orders import order_line
from gpusched.engine.supervisor.output_tail import LONGEST_CAUSE
from gpusched.engine.wire import PIPE_BUF, encode_event, joined, pack_ticket, shortened, take_frame, unpack_ticket
from gpusched.model.execution import EnterOrder, LimitOrder, NoteOrder, RunEnded, SignalOrder, StopOrder

ANY_TEXT = st.text(st.characters(exclude_categories=()))


@settings(database=None)
@given(ANY_TEXT, st.floats(allow_nan=False, allow_infinity=False), st.integers(), st.booleans())
def test_an_event_is_one_line_of_json(text: str, real: float, whole: int, flag: bool) -> None:
    line = encode_event(text=text, real=real, whole=whole, flag=flag, none=None)
    assert line.count(b"\n") == 1
    # json joins two halves of a pair, as they are one character.
    whole_text = text.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")
    expected = {"text": whole_text, "real": real, "whole": whole, "flag": flag, "none": None}
    assert json.loads(line) == expected


def test_the_longest_end_fits_one_atomic_write() -> None:
    worst = "\U0001f600" * 10_000
    cause = worst[:LONGEST_CAUSE]
    for changes in (
        {"launch_error": shortened(worst), "leftovers": ""},
        {"leftovers": joined([worst[:250]] * 999)},
        {"cause": cause, "leftovers": joined([worst[:20]] * 999, cause)},
    ):
        facts: dict[str, str | float | bool | None] = {
            "run": "9999999999.99999",
            "event": "ended",
            "start_at": 1.0e9 + 1 / 3,
            "end_at": 1.0e9 + 1 / 3,
            "exit_code": 255,
            "signal": 64,
            "stopped_by": "timeout",
            "launch_error": None,
            "gpu_oom": True,
            "cpu_s": 1.0e9 + 1 / 3,
            "system_cpu_s": 1.0e9 + 1 / 3,
            "peak_mem_mib": 1.0e9 + 1 / 3,
            **changes,
        }
        line = encode_event(**facts)
        assert len(line) <= PIPE_BUF
        assert isinstance(event_of(line), RunEnded)


@given(ANY_TEXT)
def test_events_are_read_with_any_text(text: str) -> None:
    whole_text = text.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")
    assert event_of(encode_event(run="1.1", event="refused", detail=text)) == RunRefused("1.1", whole_text)
    ended = {"run": "1.1", "event": "ended", "start_at": None, "end_at": 2.5, "cause": text}
    assert event_of(encode_event(**ended)) == RunEnded("1.1", None, 2.5, cause=whole_text)
    left = event_of(encode_event(**ended, leftovers="a(1)\nb c(2)"))
    assert left == RunEnded("1.1", None, 2.5, cause=whole_text, leftovers=("a(1)", "b c(2)"))


@pytest.mark.parametrize("line", [b"", b"[]", b"{}", b'{"run":"1.1"}', b'{"run":"1.1","event":"else"}'])
def test_what_is_no_event_is_refused(line: bytes) -> None:
    with pytest.raises(ValueError, match="."):
        event_of(line)


def test_names_of_leftovers_are_complete_and_counted() -> None:
    assert joined([]) == ""
    assert joined(["a(1)", "b c(2)"]) == "a(1)\nb c(2)"
    names = [f"process({number})" for number in range(1000)]
    kept = joined(names).split("\n")
    assert kept[:-1] == names[: len(kept) - 1]
    assert kept[-1] == f"and {1000 - len(kept) + 1} more"


@settings(database=None)
@given(st.lists(st.binary(max_size=300), max_size=5), st.integers(1, 50))
def test_tickets_survive_any_splitting(scripts: list[bytes], step: int) -> None:
    stream = b"".join(pack_ticket({"script": script, "odd": "\udcff"}) for script in scripts)
    buffer = bytearray()
    got = []
    for at in range(0, len(stream), step):
        buffer += stream[at : at + step]
        while (frame := take_frame(buffer)) is not None:
            got.append(unpack_ticket(frame))
    assert got == [{"script": script, "odd": "\udcff"} for script in scripts]
    assert not buffer


def test_orders_are_lines() -> None:
    assert order_line(StopOrder("preempt")) == "stop preempt - - ."
    assert order_line(StopOrder("cancel", signal=2, grace_s=0.0)) == "stop cancel 2 0.0 ."
    assert order_line(SignalOrder(10, "main")) == "signal 10 main ."
    assert order_line(SignalOrder(10, "step:3")) == "signal 10 step:3 ."
    assert order_line(SignalOrder(10)) == "signal 10 tree ."
    assert order_line(LimitOrder(90.5)) == "limit 90.5 ."
    assert order_line(LimitOrder(None)) == "limit - ."
    assert order_line(EnterOrder("0a9f")) == "enter 0a9f ."
    assert order_line(NoteOrder("job 7: two\nlines")) == "note job 7: two lines ."
