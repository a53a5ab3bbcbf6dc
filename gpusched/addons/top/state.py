"""What gtop knows and shows: the board, the cursor, marks, filters, open questions. Pure."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from gpusched.addons.board.query import SORTS, BoardCopy, parse_filter

PANES = ("cards", "jobs", "queues", "people", "reservations")
MARGIN = 2
"""Screens of rows that are held before and after the visible ones."""
HISTORY = 120
"""Readings of each card that are remembered."""
MOST_LOG_LINES = 500
NICE_STEP = 10


@dataclass(slots=True)
class Question:
    """An action that waits for a yes, or for the number of jobs."""

    command: str
    """The command that does the same."""
    path: str
    body: dict[str, Any]
    typed: str = ""
    count: int | None = None
    """Number to type; None if `y` suffices."""
    why: str = ""

    @property
    def is_confirmed(self) -> bool:
        if self.count is None:
            return self.typed.lower() in ("y", "yes")
        return self.typed == str(self.count)


@dataclass(slots=True)
class Log:
    """The last lines of a job's output."""

    job: str
    lines: deque[str] = field(default_factory=lambda: deque(maxlen=MOST_LOG_LINES))
    note: str = ""
    is_of_cursor: bool = False
    """Whether it goes where the cursor goes, beside the list of a wide terminal."""


@dataclass(slots=True)
class TopState:
    """All that a frame is drawn from."""

    board: BoardCopy = field(default_factory=BoardCopy)
    held_view: str = ""
    """The view that the rows of the board are of: after a change of the pane not yet the one that is shown."""
    now: float = 0.0
    """Now on the daemon's clock."""
    pane: str = "jobs"
    cursor: int = 0
    """Number of the row under the cursor, among all rows."""
    cursor_id: str | None = None
    top: int = 0
    """Number of the first visible row."""
    visible: int = 10
    """Number of rows that the list has room for."""
    card_lines: int = 0
    """Number of lines of the pane of cards, of which `visible` are shown from `card_top` on."""
    card_top: int = 0
    reservations: list[dict[str, Any]] | None = None
    """None until the daemon has told them."""
    sought: str = ""
    """The word that `n` looks for: the last plain one of a filter, also after that is removed."""
    filter: str = ""
    is_mine: bool = False
    has_ended: bool = False
    sort: str = SORTS[0]
    unfolded: set[str] = field(default_factory=set)
    marked: set[str] = field(default_factory=set)
    alike: dict[str, tuple[str, int]] = field(default_factory=dict)
    """Ids and number of the jobs that a marked row stood for."""
    typing: str | None = None
    """The filter being typed; None unless it is."""
    question: Question | None = None
    has_help: bool = False
    has_warnings: bool = False
    """Whether the daemon's warnings are shown in full."""
    is_wide_detail: bool = False
    """Whether details and why take half of the list."""
    message: str = ""
    is_refusal: bool = False
    away_since: float | None = None
    why: dict[str, Any] | None = None
    """Answer about the pending job under the cursor."""
    log: Log | None = None
    history: dict[str, deque[float | None]] = field(default_factory=dict)
    """Use of each card at its last readings."""
    is_ascii: bool = False
    is_read_only: bool = False

    # --- what is asked of the daemon ----------------------------------------------------------------

    @property
    def view(self) -> str:
        if self.pane in ("queues", "people"):
            return self.pane
        return "ended" if self.has_ended else "active"

    def query(self) -> dict[str, str]:
        """Parameters of GET /v1/board for what is visible, with rows around it."""
        found = {"view": self.view}
        words = " ".join(filter(None, (self.filter, "user:me" if self.is_mine else "")))
        if words and self.pane != "queues":
            found["filter"] = words
        if self.view in ("active", "ended"):
            found["sort"] = self.sort
            found["fold_alike"] = "1"
            if self.unfolded:
                found["unfold"] = ",".join(sorted(self.unfolded))
        # In steps, so that scrolling by a row asks for nothing new.
        step = max(1, self.visible)
        found["offset"] = str(max(0, self.top // step - MARGIN + 1) * step)
        found["limit"] = str(min(500, 2 * MARGIN * step))
        return found

    # --- rows -----------------------------------------------------------------------------------------

    @property
    def total(self) -> int:
        """Number of rows, most of which may not be known here."""
        if self.pane == "cards":
            return self.card_lines
        if self.pane == "reservations":
            return len(self.reservations or ())
        return int(self.board.facts.get("rows", {}).get("total", 0)) if self.held_view == self.view else 0

    def rows(self) -> list[dict[str, Any]]:
        """Rows that are known, from number `offset` on."""
        if self.pane == "reservations":
            return self.reservations or []
        return self.board.rows() if self.held_view == self.view else []

    @property
    def offset(self) -> int:
        return 0 if self.pane == "reservations" else int(self.board.facts.get("rows", {}).get("offset", 0))

    def row(self) -> dict[str, Any] | None:
        """The row under the cursor, if it is known."""
        rows = self.rows()
        place = self.cursor - self.offset
        return rows[place] if 0 <= place < len(rows) else None

    def shown(self) -> list[dict[str, Any]]:
        """Visible rows that are known."""
        first = self.top - self.offset
        return self.rows()[max(0, first) : max(0, first + self.visible)]

    def move(self, by: int) -> None:
        if self.pane == "cards":
            self.scroll_cards(self.card_top + by)
        else:
            self.go(self.cursor + by)

    def scroll_cards(self, top: int) -> None:
        """Show the lines of cards from this one on, and no fewer than there is room for."""
        self.card_top = max(0, min(top, self.card_lines - self.visible))

    def go(self, place: int) -> None:
        """Put the cursor on a row, and scroll if it would be out of sight."""
        if self.pane == "cards":
            self.scroll_cards(place)
            return
        self.cursor = max(0, min(place, self.total - 1))
        self.scroll()
        row = self.row()
        self.cursor_id = None if row is None else row["id"]

    def scroll(self) -> None:
        if self.cursor < self.top:
            self.top = self.cursor
        elif self.cursor >= self.top + self.visible:
            self.top = self.cursor - self.visible + 1
        self.top = max(0, min(self.top, self.total - self.visible))

    def take(self, answer: dict[str, Any], view: str) -> bool:
        """Take in an answer about a view; the cursor stays on its job. Returns whether anything has changed."""
        changed = self.board.apply(answer)
        self.held_view = view
        self.now = float(answer["now"])
        if "cards" in answer["lists"]:
            for card in answer["lists"]["cards"]["set"]:
                self.history.setdefault(card["id"], deque(maxlen=HISTORY)).append(card["utilisation"])
            known = self.board.lists.get("cards", {})
            self.history = {key: value for key, value in self.history.items() if key in known}
        self.follow()
        return changed

    def follow(self) -> None:
        """Put the cursor back on its job, wherever that is now; on another one at the same place if it is gone."""
        ids = [row["id"] for row in self.rows()]
        if self.cursor_id in ids:
            place = self.offset + ids.index(self.cursor_id)
            # What is looked at stays at the same height of the screen.
            self.top = max(0, self.top + place - self.cursor)
            self.cursor = place
        elif self.offset <= self.cursor < self.offset + len(ids):
            self.cursor_id = ids[self.cursor - self.offset]
        elif self.cursor >= self.total:
            self.cursor = max(0, self.total - 1)
            self.cursor_id = ids[-1] if ids else None
        self.scroll()

    def choose(self, pane: str) -> None:
        """Show another pane, from its beginning."""
        if pane != self.pane:
            self.pane = pane
            self.restart()

    def restart(self) -> None:
        """Begin at the first row: what the rows are has changed."""
        self.cursor = self.top = self.card_top = 0
        self.cursor_id = None
        self.marked.clear()

    # --- filters --------------------------------------------------------------------------------------

    def set_filter(self, text: str) -> None:
        """Filter the rows. A filter that cannot be read stays open with a message."""
        try:
            parse_filter(text)
        except ValueError as error:
            self.say(str(error), is_refusal=True)
            return
        self.filter, self.typing = text.strip(), None
        if words := [word for word in self.filter.split() if ":" not in word and not word.startswith("-")]:
            self.sought = words[-1]
        self.message = ""
        self.restart()

    def next_sort(self) -> None:
        self.sort = SORTS[(SORTS.index(self.sort) + 1) % len(SORTS)]
        self.restart()

    def say(self, text: str, *, is_refusal: bool = False) -> None:
        self.message, self.is_refusal = text, is_refusal

    # --- the next row with a word ---------------------------------------------------------------------

    def search(self, **more: object) -> dict[str, str]:
        """Parameters of GET /v1/board about rows in the order of the pane, one of them at most."""
        found = {key: text for key, text in self.query().items() if key not in ("offset", "limit")}
        return {**found, "limit": "1", **{key: str(value) for key, value in more.items()}}

    def search_filter(self) -> str:
        """The filter of the pane and the word that is looked for."""
        words = [*self.filter.split(), *(["user:me"] if self.is_mine else [])]
        return " ".join([*words, *([] if self.sought in words else [self.sought])])

    # --- actions --------------------------------------------------------------------------------------

    def ask(self, verb: str) -> None:
        """Ask whether to do something to the marked jobs, or the one under the cursor."""
        if self.is_read_only:
            self.say("gtop was started with --readonly", is_refusal=True)
            return
        row = self.row()
        chosen = sorted(self.marked, key=_by_number) if self.marked else [row["id"]] if row is not None else []
        known = {one["id"]: one for one in self.rows()}
        stands_for = {key: _alike(known[key]) if key in known else self.alike.get(key) for key in chosen}
        groups = {key: alike for key, alike in stands_for.items() if alike is not None}
        ids = [word for key in chosen for word in (groups[key][0].split(",") if key in groups else [key])]
        if self.pane != "jobs" or not ids or (self.has_ended and verb != "requeue"):
            self.say("no job is selected that this could be done to", is_refusal=True)
            return
        if self.has_ended:
            # What has ended is not requeued, but submitted again.
            verb = "resubmit"
        words = ",".join(ids) if len(ids) <= 20 else f"{','.join(ids[:20])},..."
        if verb == "cancel":
            question = Question(f"gcancel {words}", "/v1/jobs/cancel", {"ids": ids})
        elif verb == "resubmit":
            question = Question(f"gsub --resubmit {words}", "/v1/jobs", {"spec": {}, "resubmit": ids})
        elif verb in ("nicer", "less nice"):
            now = row["nice"] if row is not None and len(ids) == 1 else 0
            nice = now + (NICE_STEP if verb == "nicer" else -NICE_STEP)
            question = Question(
                f"gctl update {words} nice={nice}", "/v1/jobs/update", {"ids": ids, "changes": {"nice": nice}}
            )
        else:
            question = Question(f"gctl {verb} {words}", f"/v1/jobs/{verb}", {"ids": ids})
        me = self.board.parts.get("me", {}).get("user")
        count = sum(groups[key][1] if key in groups else _jobs_in(known.get(key)) for key in chosen)
        others = sorted({known[key]["user"] for key in chosen if key in known and known[key]["user"] != me})
        if count > 1 or others:
            question.count = count
            question.why = f"jobs of {', '.join(others)}" if others else ""
        self.question = question

    def mark(self) -> None:
        row = self.row()
        if row is not None and self.pane == "jobs":
            self.marked ^= {row["id"]}
            self.alike.pop(row["id"], None)
            if (alike := _alike(row)) is not None:
                self.alike[row["id"]] = alike
            self.move(1)

    def fold(self) -> None:
        """Fold or unfold the array or the equal jobs under the cursor, or those that the row under it is one of."""
        row = self.row()
        if row is None or self.pane != "jobs":
            return
        if row["tasks"] is None and not row["depth"] and not row.get("alike"):
            self.say(f"job {row['id']} is not an array, and no other is equal to it")
            return
        rows = self.rows()[: self.cursor - self.offset + 1]
        head: str = next((one["id"] for one in reversed(rows) if not one["depth"]), row["id"].partition("_")[0])
        self.unfolded ^= {head}
        self.cursor_id = head


def _alike(row: dict[str, Any] | None) -> tuple[str, int] | None:
    """Ids and number of the jobs of a row that stands for several; None while these have rows of their own."""
    if row is None or not row.get("alike") or row["is_open"]:
        return None
    ids, count = row["alike"]
    return ids, count


def _jobs_in(row: dict[str, Any] | None) -> int:
    return sum(row["tasks"].values()) if row is not None and row.get("tasks") else 1


def _by_number(job_id: str) -> tuple[int, ...]:
    return tuple(int(word) for word in job_id.split("_") if word.isdigit())
