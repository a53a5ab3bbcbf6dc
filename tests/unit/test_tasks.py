"""Sets of array tasks: reading, writing, taking out."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpusched.model.tasks import MAX_TASK, TaskSet, parse_tasks

NUMBERS = st.sets(st.integers(0, 60), max_size=40)


@pytest.mark.parametrize(
    ("text", "numbers", "written"),
    [
        ("7", [7], "7"),
        ("0-3", [0, 1, 2, 3], "0-3"),
        ("1,3,5", [1, 3, 5], "1,3,5"),
        ("0-9:3", [0, 3, 6, 9], "0-9:3"),
        ("0-10:3", [0, 3, 6, 9], "0-9:3"),
        ("8-9,0-1", [0, 1, 8, 9], "0-1,8-9"),
        ("0-4,2-6", [0, 1, 2, 3, 4, 5, 6], "0-6"),
        ("3,3,3", [3], "3"),
        ("0-3,8-12:2", [0, 1, 2, 3, 8, 10, 12], "0-3,8-12:2"),
        ("5-5:9", [5], "5"),
    ],
)
def test_a_parsed_list_is_written_in_order(text: str, numbers: list[int], written: str) -> None:
    tasks = parse_tasks(text)
    assert list(tasks) == numbers
    assert str(tasks) == written
    assert parse_tasks(written) == tasks


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "is not a list of tasks"),
        ("a", "is not a list of tasks"),
        ("1-", "is not a list of tasks"),
        ("-3", "is not a list of tasks"),
        ("3:2", "is not a list of tasks"),
        ("1,,2", "is not a list of tasks"),
        ("1.5", "is not a list of tasks"),
        ("٣", "is not a list of tasks"),
        ("1234567890", "is not a list of tasks"),
        ("9-3", "ends before it begins"),
        ("0-9:0", "has a step of 0"),
        (f"0-{MAX_TASK + 1}", f"task {MAX_TASK + 1} is above {MAX_TASK}"),
    ],
)
def test_an_invalid_list_is_refused(text: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        parse_tasks(text)


@given(NUMBERS)
def test_a_set_holds_its_elements(numbers: set[int]) -> None:
    tasks = TaskSet.of(numbers)
    assert list(tasks) == sorted(numbers)
    assert len(tasks) == len(numbers)
    assert bool(tasks) == bool(numbers)
    if numbers:
        assert list(parse_tasks(str(tasks))) == sorted(numbers)


@given(NUMBERS, st.sets(st.integers(-5, 70), max_size=40))
def test_removal_leaves_the_others(numbers: set[int], taken: set[int]) -> None:
    assert list(TaskSet.of(numbers).minus(taken)) == sorted(numbers - taken)


@given(NUMBERS)
def test_a_number_is_where_its_position_says(numbers: set[int]) -> None:
    tasks = TaskSet.of(numbers)
    for position, number in enumerate(sorted(numbers)):
        assert tasks.position(number) == position
        assert tasks.at(position) == number
    with pytest.raises(IndexError):
        tasks.at(len(numbers))
    with pytest.raises(ValueError, match="task 61 is not one of"):
        tasks.position(61)


def test_a_huge_array_is_one_range() -> None:
    tasks = parse_tasks(f"0-{MAX_TASK}")
    assert len(tasks) == MAX_TASK + 1
    assert str(tasks.without(0).without(1)) == f"2-{MAX_TASK}"
    assert str(tasks.without(5)) == f"0-4,6-{MAX_TASK}"
    assert 5 not in tasks.without(5)
