"""Labelled lines and file patterns of steps, whatever bytes and letters come."""

from __future__ import annotations

import os
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpusched.addons.slurm import streams
from gpusched.addons.slurm.streams import Labeller, Lines, Pump, expand, label_of, names_task

PIECES = st.lists(st.lists(st.sampled_from([b"\n", b"a", b"0: ", b"\0", b"\xff", b"\r", b"word"])).map(b"".join))


@given(PIECES)
def test_every_line_gets_one_label_and_nothing_is_lost(pieces: list[bytes]) -> None:
    labeller = Labeller(b"7: ")
    found = b"".join(labeller.feed(piece) for piece in pieces) + labeller.end()
    text = b"".join(pieces)
    lines = text.split(b"\n")
    if not lines[-1]:
        lines.pop()
    assert found == b"".join(b"7: " + line + b"\n" for line in lines)


@given(PIECES, PIECES)
def test_how_a_line_is_cut_into_pieces_makes_no_difference(pieces: list[bytes], others: list[bytes]) -> None:
    whole, cut = Labeller(b"1: "), Labeller(b"1: ")
    text = b"".join(pieces)
    wanted = whole.feed(text) + whole.end()
    found = b""
    at = 0
    for other in others:
        found += cut.feed(text[at : at + len(other)])
        at += len(other)
    assert found + cut.feed(text[at:]) + cut.end() == wanted
    assert (whole.end(), cut.end()) == (b"", b"")


@given(PIECES)
def test_only_whole_lines_come_before_the_end(pieces: list[bytes]) -> None:
    labeller = Labeller(b"1: ")
    for piece in pieces:
        found = labeller.feed(piece)
        assert not found or found.endswith(b"\n")


@given(st.lists(st.integers(0, 12).map(lambda size: b"x" * size), max_size=8), st.booleans())
def test_a_very_long_line_is_passed_on_with_one_label(pieces: list[bytes], is_ended: bool) -> None:
    before = streams._LONGEST
    streams._LONGEST = 10
    try:
        labeller = Labeller(b"1: ")
        if is_ended:
            pieces = [*pieces, b"\n"]
        found = b"".join(map(labeller.feed, pieces)) + labeller.end()
    finally:
        streams._LONGEST = before
    text = b"".join(pieces).removesuffix(b"\n")
    assert found == (b"1: " + text + b"\n" if text or is_ended else b"")


def test_labels_are_aligned() -> None:
    assert [label_of(task, 10) for task in (0, 9)] == [b"0: ", b"9: "]
    assert [label_of(task, 11) for task in (0, 10)] == [b" 0: ", b"10: "]
    assert label_of(5, 1000) == b"  5: "


VALUES: dict[str, str | int] = {"j": 42, "t": 3, "s": 0, "n": 0, "N": "node1", "J": "42.0", "x": "a/b", "u": "ann"}


@pytest.mark.parametrize(
    ("pattern", "wanted"),
    [
        ("o-%j-%t.txt", "o-42-3.txt"),
        ("%5j.%3t", "00042.003"),
        ("%J-%N-%u", "42.0-node1-ann"),
        ("%x", "a_b"),
        ("%%j %%", "%j %"),
        ("%b-%5b", "%b-%5b"),
        ("100%", "100%"),
        ("%5", "%5"),
        ("%5%", "%5%"),
        ("\\%j", "%j"),
        ("%99999999t", "0000000003"),
        ("%5N", "node1"),
    ],
)
def test_a_pattern_is_filled_in(pattern: str, wanted: str) -> None:
    assert expand(pattern, VALUES) == wanted


@given(st.text(st.sampled_from("%jtsnNJxuab019\\/ é\udcff"), max_size=30))
def test_any_pattern_is_filled_in_without_an_error(pattern: str) -> None:
    found = expand(pattern, VALUES)
    if "%" not in pattern or "\\" in pattern:
        assert found == pattern.replace("\\", "")
    # A name cannot add a folder.
    assert found.count("/") == pattern.count("/")


@given(st.text(st.characters(exclude_characters="%\\"), max_size=20), st.integers(0, 10**6))
def test_a_number_round_trips_through_its_pattern(text: str, number: int) -> None:
    assert expand(f"{text}%t", {"t": number}) == f"{text}{number}"
    assert expand(text.replace("%", "%%") + "%%", {}) == text + "%"


@pytest.mark.parametrize("size", [0, 1, 70_000, 300_000])
def test_the_pump_copies_all_output_also_of_a_slow_reader(size: int) -> None:
    reader, writer = os.pipe()
    pump = Pump()
    given = pump.add_output(writer, b"0: ")
    content = (b"y" * 99 + b"\n") * (size // 100) + b"z" * (size % 100)

    def write() -> None:
        with os.fdopen(given, "wb") as file:
            file.write(content)

    got: list[bytes] = []

    def read() -> None:
        while piece := os.read(reader, 5000):
            got.append(piece)

    threads = [threading.Thread(target=write), threading.Thread(target=read)]
    for thread in threads:
        thread.start()
    pump.start()
    threads[0].join(30)
    pump.finish(30)
    os.close(writer)
    threads[1].join(30)
    os.close(reader)
    lines = content.split(b"\n")
    if not lines[-1]:
        lines.pop()
    assert b"".join(got) == b"".join(b"0: " + line + b"\n" for line in lines)


@given(st.lists(st.text(st.sampled_from("ab\n"), max_size=9).map(str.encode), max_size=12))
def test_lines_are_passed_on_whole_and_complete(pieces: list[bytes]) -> None:
    lines = Lines()
    found = [lines.feed(piece) for piece in pieces]
    assert all(piece.endswith(b"\n") for piece in found if piece)
    assert (lines.due_at is None) == (b"".join(found) == b"".join(pieces))
    assert b"".join(found) + lines.end() == b"".join(pieces)


@given(st.text(st.sampled_from("ab-%tnN123\\"), max_size=9))
def test_a_pattern_names_a_task_if_it_differs_between_tasks_or_nodes(pattern: str) -> None:
    places = [{"t": task, "n": node, "N": f"n{node}"} for task in (0, 1) for node in (0, 1)]
    assert names_task(pattern) == (len({expand(pattern, place) for place in places}) > 1)
