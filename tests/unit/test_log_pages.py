"""Pages of a log: together they are the file, and they end with lines where lines are short."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gpusched.api.handlers.logs import LINE_BYTES, PAGE_BYTES, cut_page, pages_of


def all_pages(data: bytes) -> list[bytes]:
    found = []
    for page in range(1, pages_of(len(data)) + 1):
        at = (page - 1) * PAGE_BYTES
        found.append(cut_page(data[at : at + PAGE_BYTES + LINE_BYTES], page, len(data)).text)
    return found


LINES = st.lists(
    st.tuples(st.sampled_from(["x", "é", "\N{FACE WITH TEARS OF JOY}", "\x1b[31m"]), st.integers(0, 3 * PAGE_BYTES)),
    max_size=8,
)


@given(LINES, st.booleans())
def test_all_pages_together_are_the_file_without_a_cut_character(lines: list[tuple[str, int]], ends: bool) -> None:
    data = "\n".join(text * (length // len(text.encode())) for text, length in lines).encode() + b"\n" * ends
    pages = all_pages(data)
    assert b"".join(pages) == data
    for page in pages:
        page.decode()


def test_pages_end_with_a_line_where_lines_are_short() -> None:
    data = b"".join(b"line %d\n" % number for number in range(40_000))
    pages = all_pages(data)
    assert len(pages) > 2
    assert all(page.endswith(b"\n") for page in pages)


def test_bytes_that_are_no_text_are_shown_too() -> None:
    data = b"\xff\x80" * PAGE_BYTES
    assert b"".join(all_pages(data)) == data


def test_an_empty_file_is_one_empty_page() -> None:
    assert all_pages(b"") == [b""]
