"""The text formats, read back by a strict reader of our own; names that try to break out of their quotes."""

from __future__ import annotations

from math import inf, nan

import pytest
from exposition_reader import read_page, values
from hypothesis import given
from hypothesis import strategies as st

from gpusched.errors import BrokenInvariant
from gpusched.model import series
from gpusched.model.metrics import FORMATS, OPENMETRICS, PROMETHEUS, Histogram, MetricFamily, Page, label

GAUGE = MetricFamily("lab_heat_celsius", "gauge", 'How "hot"\nit \\ is', ("place", "who"), unit="celsius")
COUNTER = MetricFamily("lab_starts", "counter", "Starts.", ("who",))
INFO = MetricFamily("lab_build", "info", "Version.", ("version",))
HISTOGRAM = MetricFamily("lab_wait_seconds", "histogram", "Waits.", ("who",), unit="seconds")

HOSTILE = [
    'a"b',
    "a\nb",
    "a\\b",
    "\\",
    '"',
    '"} 1\nfake_total 7',
    "ünï 日本 🦊",
    "",
    "\\n",
    "a\\\nb",
    "\u2028",
    "x\ry",
    "\udcff",
]


def page() -> Page:
    made, waits = Page(), Histogram((0.5, 10.0))
    for seconds in (0.1, 0.5, 3.0, 99.0):
        waits.add(seconds)
    made.put(GAUGE, -1.5, "room", "ann")
    made.put(GAUGE, None, "room", "nobody knows")
    made.put(COUNTER, 3, "ann")
    made.put(INFO, 1, "1.0")
    made.put(HISTOGRAM, waits, "ann")
    return made


def test_openmetrics_names_families_without_sample_suffixes() -> None:
    assert page().text(OPENMETRICS) == (
        '# HELP lab_heat_celsius How \\"hot\\"\\nit \\\\ is\n'
        "# TYPE lab_heat_celsius gauge\n"
        "# UNIT lab_heat_celsius celsius\n"
        'lab_heat_celsius{place="room",who="ann"} -1.5\n'
        "# HELP lab_starts Starts.\n"
        "# TYPE lab_starts counter\n"
        'lab_starts_total{who="ann"} 3\n'
        "# HELP lab_build Version.\n"
        "# TYPE lab_build info\n"
        'lab_build_info{version="1.0"} 1\n'
        "# HELP lab_wait_seconds Waits.\n"
        "# TYPE lab_wait_seconds histogram\n"
        "# UNIT lab_wait_seconds seconds\n"
        'lab_wait_seconds_bucket{who="ann",le="0.5"} 2\n'
        'lab_wait_seconds_bucket{who="ann",le="10.0"} 3\n'
        'lab_wait_seconds_bucket{who="ann",le="+Inf"} 4\n'
        'lab_wait_seconds_count{who="ann"} 4\n'
        'lab_wait_seconds_sum{who="ann"} 102.6\n'
        "# EOF\n"
    )


def test_the_older_format_contains_only_what_its_readers_accept() -> None:
    text = page().text(PROMETHEUS)
    assert "# UNIT" not in text
    assert "# EOF" not in text
    assert "# TYPE lab_build_info gauge\n" in text
    assert '# TYPE lab_starts_total counter\nlab_starts_total{who="ann"} 3\n' in text
    # Only backslashes and line ends are escaped in a help text there.
    assert '# HELP lab_heat_celsius How "hot"\\nit \\\\ is\n' in text


@pytest.mark.parametrize("form", FORMATS)
def test_both_formats_agree(form: str) -> None:
    assert values(page().text(form), is_open=form == OPENMETRICS) == values(page().text(PROMETHEUS))


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("name", HOSTILE)
def test_no_name_breaks_out_of_its_quotes(form: str, name: str) -> None:
    made = Page()
    made.put(COUNTER, 1, name)
    made.put(GAUGE, 2, name, name)
    found = values(made.text(form), is_open=form == OPENMETRICS)
    assert found == {
        ("lab_starts_total", (("who", label(name)),)): 1,
        ("lab_heat_celsius", (("place", label(name)), ("who", label(name)))): 2,
    }
    made.text(form).encode()


@given(names=st.lists(st.text(st.characters(exclude_categories=())), unique_by=label, min_size=1))
def test_any_names_round_trip(names: list[str]) -> None:
    made = Page()
    for number, name in enumerate(names):
        made.put(COUNTER, number, name)
    found = values(made.text(OPENMETRICS), is_open=True)
    assert [dict(labels)["who"] for _, labels in found] == [label(name) for name in names]
    assert list(found.values()) == list(range(len(names)))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (3, "3"),
        (0.1, "0.1"),
        (inf, "+Inf"),
        (-inf, "-Inf"),
        (nan, "NaN"),
        (1e300, "1e+300"),
        (2.5e9, "2500000000"),
    ],
)
def test_numbers_are_exact(value: float, text: str) -> None:
    made = Page()
    made.put(GAUGE, value, "", "")
    assert made.text(PROMETHEUS).splitlines()[-1].rpartition(" ")[2] == text


def test_a_page_its_readers_would_refuse_is_not_made() -> None:
    made = page()
    for family, value, labels in (
        (COUNTER, 1, ("ann",)),
        (COUNTER, 1, ()),
        (COUNTER, Histogram(()), ("bob",)),
        (HISTOGRAM, 1, ("bob",)),
    ):
        with pytest.raises(BrokenInvariant, match=family.name):
            made.put(family, value, *labels)


def test_families_follow_the_naming_rules() -> None:
    names = [family.name for family in series.FAMILIES]
    assert len(set(names)) == len(names) > 35
    for family in series.FAMILIES:
        assert family.name.startswith("gpusched_")
        assert family.help.endswith(".")
        assert not family.unit or family.name.endswith("_" + family.unit)
        ends = ("_total", "_info", "_count", "_sum", "_bucket", "_created", "_mib", "_ms")
        assert not family.name.endswith(ends), family.name
        # Nothing that a sample of another family could be taken for.
        assert not any(family.name == other + end for other in names for end in ends)


def test_the_reader_refuses_invalid_pages() -> None:
    good = page().text(OPENMETRICS)
    for old, new in (
        ("# EOF\n", ""),
        ('lab_starts_total{who="ann"} 3\n', 'lab_starts_total{who="ann"} 3\nlab_starts_total{who="ann"} 3\n'),
        ("lab_starts_total{", "lab_starts{"),
        ('"ann"} 3', '"ann"} three'),
        ('who="ann"} -1.5', 'who="a"nn"} -1.5'),
        ("# TYPE lab_starts counter\n", ""),
        ('le="+Inf"} 4', 'le="+Inf"} 5'),
        ("# UNIT lab_heat_celsius celsius", "# UNIT lab_heat_celsius kelvin"),
    ):
        assert old in good
        with pytest.raises((AssertionError, KeyError, IndexError)):
            read_page(good.replace(old, new), is_open=True)
