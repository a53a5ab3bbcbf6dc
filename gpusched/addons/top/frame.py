"""Frames of gtop: the state as lines of styled text, for any size of terminal. Pure.

A line is a list of pieces (text, style), where a style is a word of `STYLES`. All text of other people passes `clean`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from gpusched.addons.top.state import PANES, TopState
from gpusched.addons.top.text import (
    Line,
    Piece,
    bar,
    blank,
    both_ends,
    clean,
    filled,
    sized,
    when,
    width_of,
    wrapped,
)
from gpusched.cli.forecast import up_to_minute
from gpusched.cli.ghist import cause
from gpusched.cli.sparklines import spark
from gpusched.cli.tables import cells
from gpusched.model.state_names import COMPACT
from gpusched.model.units import ordinal, span

STYLES = ("", "title", "good", "warn", "dim", "key", "cursor", "mark", "head", "ask", "card", "full")
"""Blue for good, orange for warn, grey for dim; letters and words say the same."""
WIDE, WIDER, WIDEST = 100, 130, 180
_NARROW = 80
_SOUND = ("idle", "allocated", "mixed")
_LONG_HEADER = 120
_SLIM = 58
"""Width from which a list has GPUs and expected times, beside a reason that can be read."""
_WIDE_LIST = 90
"""Width from which a list has its wide columns."""
_MIB_PER_GIB = 1024
_HOT_C = 85
_BAR = 10
_LITTLE, _MUCH, _FULL = 0.05, 0.9, 0.97


# --- the whole frame ------------------------------------------------------------------------------


def frame(state: TopState, width: int, height: int) -> list[Line]:
    """Exactly `height` lines, each at most `width` wide. Sets how many rows are visible in `state`."""
    if width < 40 or height < 8:
        text = f"gtop needs 40 columns and 8 lines; these are {width} and {height}"
        return sized([[(text[:width], "warn")]], height)
    if state.has_help:
        return sized([_header(state, width), *_help(width, height - 2), _keys(state, width)], height)
    if state.has_warnings:
        return sized([_header(state, width), *_warnings(state, width, height - 2), _keys(state, width)], height)
    top = [_header(state, width), *_notices(state, width)]
    bottom = [*_status(state, width), _keys(state, width)]
    room = height - len(top) - len(bottom)
    if not state.board.parts:
        waiting: Line = [("waiting for the daemon's answer", "dim")]
        return sized([*top, waiting, *blank(room - 1), *bottom], height)
    if state.pane == "cards":
        state.visible = max(1, room)
        body = _cards(state, width, room, is_whole=True)
        # Which cards are shown is known only now.
        bottom = [*_status(state, width), _keys(state, width)]
        return _dimmed(sized([*top, *body, *blank(room - len(body)), *bottom], height), state)
    cards = _cards(state, width, _room_for_cards(state, width, room), is_whole=False)
    is_log_below = state.log is not None and not (state.log.is_of_cursor and width >= WIDEST)
    log = _log(state, width, max(1, (room - len(cards)) // 3)) if is_log_below else []
    left = room - len(cards) - len(log)
    is_beside = width >= WIDER
    share = left // 2 if state.is_wide_detail else 3 if height > 30 else 2
    details = _details(state, width // 3 if is_beside else width)
    below = [] if is_beside else details[:share]
    listed = max(1, left - len(below) - 1)
    state.visible = listed
    state.scroll()
    list_width = width - width // 3 - 1 if is_beside else width
    rows = _rows(state, list_width)
    rows += blank(listed + 1 - len(rows))
    if is_beside:
        side = [*details[: listed + 1], *blank(listed + 1 - len(details))]
        if state.log is not None and not is_log_below:
            share = max(len(details) + 1, (listed + 1) // 3)
            side = [*side[:share], *_log(state, width - list_width - 1, listed + 1 - share)]
        edge = ("|" if state.is_ascii else "│", "dim")
        rows = [[*filled(row, list_width), edge, *one] for row, one in zip(rows, side, strict=False)]
    body = [*cards, *rows, *below, *blank(left - len(below) - listed - 1), *log]
    return _dimmed(sized([*top, *body, *bottom], height), state)


def _dimmed(lines: list[Line], state: TopState) -> list[Line]:
    """The lines without colours below the header while the daemon is away: they are old."""
    if state.away_since is None:
        return lines
    return [lines[0], *([(text, "dim") for text, _ in line] for line in lines[1:])]


# --- header, notices, keys ------------------------------------------------------------------------


def _header(state: TopState, width: int) -> Line:
    """Counts first: in a narrow terminal the clock, the host's name and the user go before them."""
    parts = state.board.parts
    if state.away_since is not None:
        since = time.strftime("%H:%M", time.localtime(state.away_since))
        name = clean(parts.get("daemon", {}).get("node") or "gtop", 20)
        return both_ends([(f" {name} ", "title")], [(f"daemon away since {since} ", "warn")], width)
    if not parts:
        return filled([(" gtop ", "title")], width)
    left: list[tuple[int, Line]] = _header_parts(state, width)
    clock = time.strftime("%H:%M:%S", time.localtime(state.now)) if state.now else ""
    daemon = parts["daemon"]
    troubles = len(daemon["warnings"]) + len(daemon["failing_steps"])
    warned = f"{troubles} warning{'s' * (troubles > 1)}: ! " if width >= 60 else f"{troubles} ! "
    right: list[tuple[int, Line]] = [(5, [(f"{clock}  ", "dim")])]
    right.append((1, [(warned, "warn")]) if troubles else (4, [("daemon ok ", "good")]))
    for least in range(6, 0, -1):
        line = [piece for rank, pieces in left if rank <= least for piece in pieces]
        end = [piece for rank, pieces in right if rank <= least for piece in pieces]
        if width_of(line) + width_of(end) < width:
            break
    return both_ends(line, end, width)


def _header_parts(state: TopState, width: int) -> list[tuple[int, Line]]:
    """The left pieces of the header, each with its rank; those of the highest rank are left out first."""
    parts = state.board.parts
    totals, me, daemon = parts["totals"], parts["me"], parts["daemon"]
    jobs = totals["jobs"]
    nodes = state.board.lists.get("nodes", {})
    name = clean(daemon["node"] if len(nodes) == 1 else daemon["cluster_name"], 20)
    found: list[tuple[int, Line]] = [(4, [(f" {name} ", "title")])]
    if len(nodes) > 1:
        found.append((3, [(f" {len(nodes)} nodes", "")]))
    busy = (f" {totals['gpus_busy']} busy", "good" if totals["gpus_busy"] else "")
    free = f" {totals['gpus_free']} free " if width >= _WIDE_LIST else " "
    found.append((1, [(f"  {totals['gpus']} cards", ""), busy, (free, "")]))
    counts: Line = []
    for word, value in (("R", "RUNNING"), ("PD", "PENDING"), ("H", "HELD"), ("S", "SUSPENDED"), ("CG", "COMPLETING")):
        if jobs.get(value) or word in ("R", "PD"):
            counts += [(f" {word} ", "dim"), (f"{jobs.get(value, 0):,}", "good" if word == "R" else "")]
    found += [(1, counts), (2, [(f"  {clean(me['user'], 16)}", "title" if width >= _LONG_HEADER else "")])]
    mine = me["jobs"]
    if width >= _LONG_HEADER:
        found.append((2, [(f" R {mine.get('RUNNING', 0):,} PD {mine.get('PENDING', 0):,}", "")]))
    if me["fair_share"] is not None:
        share = f" fair share {me['fair_share']:.0%}" if width >= _LONG_HEADER else f" {me['fair_share']:.0%} fair"
        found.append((6, [(share, "dim")]))
    return found


def _troubles(state: TopState) -> list[str]:
    """What the daemon warns of."""
    daemon = state.board.parts.get("daemon", {"warnings": (), "failing_steps": ()})
    return [*daemon["warnings"], *(f"{one['step']} fails: {one['error']}" for one in daemon["failing_steps"])]


def _warnings(state: TopState, width: int, height: int) -> list[Line]:
    """All warnings of the daemon, in full."""
    lines: list[Line] = [[], [("what the daemon warns of", "title")], []]
    for text in map(clean, _troubles(state) or ["nothing"]):
        lines += [[(f"  {part}", "warn" if _troubles(state) else "dim")] for part in wrapped(text, width - 4)]
        lines.append([])
    return sized(lines, height)


def _notices(state: TopState, width: int) -> list[Line]:
    """One line about drains, maintenance and nodes out of order, if there are any."""
    words = [
        f"{clean(node['id'])} {node['state']}: {clean(node['why'] or 'no reason known')}"
        for node in state.board.lists.get("nodes", {}).values()
        if node["state"] in ("down", "unreachable")
    ]
    for one in state.board.parts.get("notices", ()):
        if one["kind"] in ("drain", "pause"):
            said = f": {clean(one['message'])}" if one["message"] else ""
            words.append(f"{clean(one['what'])} {'drained' if one['kind'] == 'drain' else 'paused'}{said}")
        else:
            words.append(f"maintenance {when(one['start_at'], state.now)}: {clean(one['message'] or one['what'])}")
    problem = state.board.parts.get("me", {}).get("config_problem")
    if problem:
        words.insert(0, clean(problem))
    return [[(clean("; ".join(words), width), "warn")]] if words else []


def _status(state: TopState, width: int) -> list[Line]:
    """The line above the keys: a question, a filter being typed, or the last message; and which rows are shown."""
    if state.question is not None:
        one = state.question
        if one.count is None:
            ask = "? [y/N] "
        else:
            about = f" ({one.why})" if one.why else ""
            ask = f"{clean(about)}: type {one.count} to do it to {one.count} job{'s' * (one.count > 1)}: "
        room = width - cells(ask) - len(one.typed) - 1
        return [[(clean(one.command, max(8, room)), "ask"), (ask, "ask"), (one.typed, ""), ("_", "key")]]
    if state.typing is not None:
        room = max(4, width - 40)
        line: Line = [("/", "key"), (clean(state.typing[-room:]), ""), ("_", "key")]
        if state.message:
            line.append((f"  {clean(state.message)}", "warn"))
        else:
            line.append(("   user:bob st:PD queue:x node:y name", "dim"))
        return [filled(line, width)]
    place = [(_place(state), "dim")]
    if state.message:
        return [both_ends([(clean(state.message), "warn" if state.is_refusal else "good")], place, width)]
    troubles = _troubles(state)
    return [both_ends([(clean(troubles[0]), "warn")] if troubles else [], place, width)]


def _place(state: TopState) -> str:
    """Where the cursor is, and what the rows are."""
    words = [" ".join(filter(None, (clean(state.filter, 30), "mine" if state.is_mine else "")))]
    if state.pane == "cards":
        cards = len(state.board.lists.get("cards", {}))
        if state.card_lines <= state.visible:
            return ""
        columns = -(-cards // state.card_lines)
        first, last = state.card_top * columns, (state.card_top + state.visible) * columns
        return f"cards {first + 1}-{min(last, cards)} of {cards}"
    if state.pane == "reservations":
        return f"{state.cursor + 1 if state.total else 0} of {state.total}"
    if state.view == "ended":
        words.append("ended within a day")
    if state.marked:
        words.append(f"{len(state.marked)} marked")
    if state.view in ("active", "ended") and state.sort != "queue":
        words.append(f"by {state.sort}")
    words.append(f"{state.cursor + 1 if state.total else 0:,} of {state.total:,}")
    return ", ".join(filter(None, words))


_KEYS = (
    ("w", "why"),
    ("l", "log"),
    ("c", "cancel"),
    ("h", "hold"),
    ("r", "release"),
    ("/", "filter"),
    ("m", "mine"),
    ("t", "tree"),
    ("o", "sort"),
    ("e", "ended"),
    ("R", "requeue"),
    ("space", "mark"),
    ("1-5", "panes"),
)


def _keys(state: TopState, width: int) -> Line:
    if state.question is not None:
        return [("enter", "key"), (" do it  ", ""), ("esc", "key"), (" leave it", "")]
    if state.typing is not None:
        return [("enter", "key"), (" filter  ", ""), ("esc", "key"), (" leave it", "")]
    if state.has_help or state.has_warnings:
        return [("any key", "key"), (" back", "")]
    last: Line = [("?", "key"), (" help ", ""), ("q", "key"), (" quit", "")]
    if state.away_since is not None:
        return [("q", "key"), (" quit", "")]
    line: Line = []
    hidden = {"c", "h", "r", "R"} if state.is_read_only else {"c", "h", "r"} if state.has_ended else set()
    elsewhere = ("1-5",) if state.pane == "reservations" else ("/", "m", "1-5")
    for key, word in _KEYS:
        if key in hidden or (state.pane != "jobs" and key not in elsewhere):
            continue
        shown = "resubmit" if key == "R" and state.has_ended else word
        piece: Line = [(key, "key"), (f" {shown} ", "")]
        if width_of(line) + width_of(piece) + width_of(last) > width:
            break
        line += piece
    return filled([*line, *last], width)


_HELP = (
    ("arrows j k", "move"),
    ("g G Home End", "first, last"),
    ("PgUp PgDn", "a page"),
    ("tab 1 2 3 4 5", "panes: " + ", ".join(PANES)),
    ("/", "filter: user:bob st:PD queue:x node:y name; -user:bob for all others"),
    ("n", "next row, of all, with the last filter's last word; esc first to see the others"),
    ("m u", "only mine; only those of the user under the cursor"),
    ("e", "jobs that have ended within a day"),
    ("o", "next order: queue, id, name, user, state, gpus, time, expected"),
    ("t enter", "unfold or fold an array, or jobs that are equal"),
    ("space U", "mark a job; unmark all"),
    ("w", "why it waits, with what would help"),
    ("l", "its output, live; from 180 columns on it is beside the list, of the job under the cursor"),
    ("c F9", "cancel"),
    ("h r", "hold, release"),
    ("R", "requeue; of ended jobs: submit a copy"),
    ("+ -", "nice: later, sooner"),
    ("!", "what the daemon warns of"),
    ("? F1", "this page"),
    ("q F10", "quit"),
)


def _help(width: int, height: int) -> list[Line]:
    lines: list[Line] = [[], [("gtop: the cards and the queue, live", "title")], []]
    lines += [[(f"  {keys:<14}", "key"), (clean(text, width - 16), "")] for keys, text in _HELP]
    lines += [[], [("A key that changes a job shows the command that does the same, and asks first.", "dim")]]
    return sized(lines, height)


# --- cards ----------------------------------------------------------------------------------------


def _room_for_cards(state: TopState, width: int, room: int) -> int:
    return max(2, room // 3) if room > 12 else max(1, room // 4)


def _cards(state: TopState, width: int, room: int, *, is_whole: bool) -> list[Line]:
    """Cards in as many lines as there is room for: one a line, or two where they are many."""
    cards = list(state.board.lists.get("cards", {}).values())
    has_nodes = len(state.board.lists.get("nodes", {})) > 1
    if not cards:
        errors = [node["gpu_error"] for node in state.board.lists.get("nodes", {}).values() if node.get("gpu_error")]
        return [[(clean(errors[0] if errors else "no GPUs", width), "warn" if errors else "dim")]]
    columns = 1 if len(cards) <= min(6, room) or (is_whole and len(cards) <= room) else 2
    label = max(len(_label(card, has_nodes)) for card in cards)
    model = max(len(_model(card)) for card in cards) if columns == 1 or width >= 160 else 0
    column = (width - (columns - 1) * 2) // columns
    lines: list[Line] = []
    per_page = room * columns
    if is_whole:
        state.card_lines = -(-len(cards) // columns)
        state.scroll_cards(state.card_top)
        begin = state.card_top * columns
        cards = cards[begin : begin + per_page]
    shown = cards if len(cards) <= per_page else cards[: max(columns, per_page - columns)]
    for at in range(0, len(shown), columns):
        line: Line = []
        for card in shown[at : at + columns]:
            if line:
                line.append(("  ", ""))
            line += filled(_card(state, card, column, label, model, has_nodes), column)
        lines.append(line)
    if len(shown) < len(cards):
        rest = cards[len(shown) :]
        free = sum(card["state"] == "idle" for card in rest)
        more = f"and {len(rest)} more cards, {free} of them idle; all: 1"
        lines.append([(more, "dim")])
    return lines


def _label(card: dict[str, Any], has_nodes: bool) -> str:
    return f"{clean(card['node'], 12)}:{card['label']}" if has_nodes else str(card["label"])


def _model(card: dict[str, Any]) -> str:
    name = clean(card["mig_profile"] or card["name"])
    for word in ("NVIDIA ", "GeForce ", "Tesla "):
        name = name.replace(word, "")
    return clean(name.partition("-")[0], 10)


def _card(state: TopState, card: dict[str, Any], width: int, label: int, model: int, has_nodes: bool) -> Line:
    use = card["utilisation"]
    line: Line = [(f"{_label(card, has_nodes):<{label}} ", "card")]
    if model:
        line.append((f"{_model(card):<{model}} ", ""))
    size = _BAR if width >= WIDE else 6
    line += bar(use, size if width >= _NARROW else _BAR if width >= 60 else 6, state.is_ascii, _load(use))
    line.append((" n/a" if use is None else f"{use:4.0%}", "dim" if use is None else ""))
    if width >= _NARROW:
        used, total = card["vram_used_mib"], card["vram_total_mib"]
        part = used / total if used is not None and total else None
        line += [(" ", ""), *bar(part, size, state.is_ascii, _load(part, _FULL))]
    line.append((f" {_memory(card):>8}", ""))
    if width >= 60:
        line.append(
            (f" {_number(card['temperature_c'], 'C'):>4}", "warn" if (card["temperature_c"] or 0) >= 85 else "dim")
        )
        line.append((f" {_number(card['power_w'], 'W'):>4}", "dim"))
    if width >= WIDER and state.history.get(card["id"]):
        cells_of_it = 60 if width >= WIDEST else 20
        line += [(" ", ""), (spark(state.history[card["id"]], cells_of_it, state.is_ascii), "good")]
    return [*line, ("  ", ""), *_holders(state, card, width)]


def _load(part: float | None, warned: float = 2.0) -> str:
    """The style of a bar: grey for next to nothing, bold for nearly all, orange from `warned` on."""
    if part is None or part < _LITTLE:
        return "dim"
    return "warn" if part >= warned else "full" if part >= _MUCH else "good"


def _holders(state: TopState, card: dict[str, Any], width: int) -> Line:
    line: Line = []
    for job in card["jobs"][:3]:
        if line:
            line.append((", ", ""))
        line += [(f"{job['id']} {clean(job['user'], 12)}", "good"), (f" {clean(job['name'], 20)}", "")]
        if job["is_ending"]:
            line.append((" ending", "dim"))
        if job["idle_at"] is not None:
            line.append((f" IDLE {span(max(0.0, state.now - job['idle_at']))}", "warn"))
        elif width >= WIDE and job["start_at"] is not None:
            line.append((f" {span(max(0.0, state.now - job['start_at']))}", "dim"))
    if len(card["jobs"]) > 3:
        line.append((f" and {len(card['jobs']) - 3} more", "dim"))
    if card["others"]:
        line.append((f"{' ' if line else ''}others", "dim"))
    # A sentence of a card that works is elsewhere.
    told = "" if card["state"] in _SOUND else card["why"] or ""
    for process in [process for process in card["foreign"] if f"pid {process['pid']} " not in told][:2]:
        name = clean(process["name"] or "?", 16).rpartition("/")[2]
        who = clean(process["user"] or "?", 12)
        line.append((f"{' ' if line else ''}foreign: {who} {name} {process['pid']}", "warn"))
    if card["state"] not in _SOUND:
        why = f": {clean(card['why'])}" if card["why"] else ""
        line.insert(0, (f"{card['state']}{why} ", "warn"))
    elif not line:
        line.append(("idle", "dim"))
    return line


def _memory(card: dict[str, Any]) -> str:
    used, total = card["vram_used_mib"], card["vram_total_mib"]
    if used is None and total is None:
        return "n/a"
    shown = "n/a" if used is None else f"{used / _MIB_PER_GIB:.0f}"
    return shown + ("" if total is None else f"/{total / _MIB_PER_GIB:.0f}G")


def _number(value: float | None, unit: str) -> str:
    return "n/a" if value is None else f"{value:.0f}{unit}"


# --- rows -----------------------------------------------------------------------------------------


def _rows(state: TopState, width: int) -> list[Line]:
    """Header and visible rows of the pane's list."""
    if state.pane == "people":
        columns = _people_columns(state)
    elif state.pane == "queues":
        columns = _queue_columns()
    elif state.pane == "reservations":
        columns = _reservation_columns(state)
    else:
        columns = _job_columns(state, width + WIDE - _WIDE_LIST)
    shown = state.shown()
    fixed = sum(size for _, size, _ in columns if size > 0) + len(columns) - 1 + 2
    flexible = [size for _, size, _ in columns if size <= 0]
    room = max(0, width - fixed)
    weight = sum(-size for size in flexible)
    sizes = [size if size > 0 else max(4, room * -size // max(1, weight)) for _, size, _ in columns]
    head = "  " + " ".join(f"{title[:size]:<{size}}" for (title, _, _), size in zip(columns, sizes, strict=True))
    lines: list[Line] = [filled([(clean(head, width), "head")], width, "head")]
    for place, row in enumerate(shown, start=max(state.top, state.offset)):
        is_under = place == state.cursor
        is_marked = row["id"] in state.marked
        sign = ">" if is_under else " "
        line: Line = [(f"{sign}{'*' if is_marked else ' '}", "mark" if is_marked else "")]
        for number, ((_, _, read), size) in enumerate(zip(columns, sizes, strict=True)):
            text, style = read(row, size)
            shown_text = clean(text, size)
            if number:
                line.append((" ", ""))
            line.append((shown_text + " " * (size - cells(shown_text)), style))
        line = filled(line, width)
        if is_under:
            line = [(text, "cursor" if style in ("", "dim", "good") else f"cursor {style}") for text, style in line]
        lines.append(line)
    if state.pane == "reservations" and not shown:
        known = state.reservations is not None
        text = "no reservations and no maintenance" if known else "waiting for the daemon's answer"
        lines.append([(f"  {text}", "dim")])
    elif not shown and state.held_view == state.view:
        lines.append([("  no jobs" if state.view in ("active", "ended") else "  no user has jobs", "dim")])
    return lines


_Column = tuple[str, int, Any]
"""Title, width (negative: a share of what is left), and a function of a row and its width to text and style."""


def _reservation_columns(state: TopState) -> list[_Column]:
    from gpusched.cli.reservations import keeps, whom  # only for this pane

    def begins(row: dict[str, Any], _: int) -> Piece:
        return ("active", "good") if row["is_active"] else (when(row["next"]["start_at"], state.now), "")

    return [
        ("NAME", 14, lambda row, size: (row["name"], "")),
        ("BEGINS", 12, begins),
        ("ENDS", 12, lambda row, size: (when(row["next"]["end_at"], state.now), "")),
        ("KEEPS", -1, lambda row, size: (keeps(row), "")),
        ("FOR", -1, lambda row, size: (whom(row), "warn" if row["is_maintenance"] else "")),
    ]


def _job_columns(state: TopState, width: int) -> list[_Column]:
    longest = max((cells(_shown_id(row)) for row in state.shown()), default=2)
    is_slim = width < _SLIM + WIDE - _WIDE_LIST
    columns: list[_Column] = [
        ("ID", min(14, max(6, longest)), lambda row, size: (_shown_id(row), "")),
        ("NAME", -2 if width >= WIDE or is_slim else 10, lambda row, size: (_name(row), "")),
    ]
    if width >= _NARROW:
        columns.append(("USER", 8, lambda row, size: (row["user"], "")))
    if width >= WIDE + 10:
        columns.append(("QUEUE", 9, lambda row, size: (row["queue"], "dim")))
    columns += [
        ("ST", 2, lambda row, size: (_letters(row), _STATE_STYLES.get(row["state"], ""))),
        ("TIME", 6, lambda row, size: (_time(row, state.now), "")),
    ]
    if not is_slim:
        columns.append(("GPU", 3, lambda row, size: (str(row["gpus"]), "" if row["gpus"] else "dim")))
    if width >= WIDE:
        columns.append(("WHERE", 12, lambda row, size: (row["where"], "dim")))
    title = "REASON / PROGRESS" if width >= _NARROW else "REASON"
    columns.append((title, -3, lambda row, size: _doing(row, state, size)))
    if is_slim:
        return columns
    if state.has_ended:
        columns.append(("ENDED", 12, lambda row, size: (when(row["end_at"], state.now), "")))
    else:
        columns.append(("EXPECTED", 12, lambda row, size: _expected(row, state.now)))
    return columns


def _people_columns(state: TopState) -> list[_Column]:
    def jobs(row: dict[str, Any], name: str) -> str:
        return f"{row['jobs'].get(name, 0):,}"

    return [
        ("USER", -1, lambda row, size: (row["user"], "")),
        ("GPUS", 6, lambda row, size: (f"{row['gpus']:g}", "good" if row["gpus"] else "dim")),
        ("RUNNING", 8, lambda row, size: (jobs(row, "RUNNING"), "")),
        ("PENDING", 8, lambda row, size: (jobs(row, "PENDING"), "")),
        ("WAITING GPUS", 12, lambda row, size: (f"{row['gpus_waiting']:,}", "")),
        ("FAIR SHARE", 11, lambda row, size: ("n/a" if row["fair_share"] is None else f"{row['fair_share']:.0%}", "")),
    ]


def _queue_name(row: dict[str, Any], size: int) -> tuple[str, str]:
    is_paused = row.get("state") == "paused"
    return "  " * row["depth"] + row["name"] + (" (paused)" if is_paused else ""), "warn" if is_paused else ""


def _queue_columns() -> list[_Column]:
    def amount(name: str) -> Any:
        return lambda row, size: (f"{row[name]:g}" if row[name] else "-", "" if row[name] else "dim")

    return [
        ("QUEUE", -1, _queue_name),
        ("RUNNING", 8, lambda row, size: (f"{row['running']:,}", "")),
        ("PENDING", 8, lambda row, size: (f"{row['pending']:,}", "")),
        ("USED", 6, amount("used_gpus")),
        ("OWN", 6, amount("guaranteed_gpus")),
        ("MAX", 6, amount("max_gpus")),
        ("BORROWED", 8, amount("borrowed_gpus")),
        ("LENT", 6, amount("lent_gpus")),
    ]


_STATE_STYLES = {"RUNNING": "good", "SUSPENDED": "warn", "COMPLETING": "dim", "FAILED": "warn", "TIMEOUT": "warn"}
_STATE_STYLES |= {"OUT_OF_MEMORY": "warn", "NODE_FAIL": "warn", "COMPLETED": "good", "CANCELLED": "dim"}


def _shown_id(row: dict[str, Any]) -> str:
    text = ("  " if row["depth"] else "") + str(row["id"])
    if row["tasks"] is None:
        if not row.get("alike"):
            return text
        return text if row["is_open"] else f"{text}[{row['alike'][1]:,}]+"
    return f"{text}[{sum(row['tasks'].values()):,}]{'-' if row['is_open'] else '+'}"


def _name(row: dict[str, Any]) -> str:
    return str(row["name"])


def _letters(row: dict[str, Any]) -> str:
    if row["hold"] and row["state"] == "PENDING":
        return "H"
    return COMPACT[row["state"]]


def _time(row: dict[str, Any], now: float) -> str:
    if row["state"] == "PENDING" or row["start_at"] is None:
        return span(max(0.0, now - row["submit_at"])) if row["state"] == "PENDING" else ""
    until = row["end_at"] or row["suspended_at"] or now
    return span(max(0.0, until - row["start_at"] - (row["suspended_s"] or 0.0)))


def _doing(row: dict[str, Any], state: TopState, size: int) -> Piece:
    """Why a pending job waits and its place, how far a running one is, how an ended one ended."""
    if row["tasks"] and len(row["tasks"]) > 1:
        counts = ", ".join(f"{number:,} {COMPACT[name]}" for name, number in sorted(row["tasks"].items()))
        return counts, ""
    if row["state"] == "PENDING":
        place, reason = row.get("place"), row["reason"] or ""
        if place is None:
            return reason, "dim"
        short = (f"{ordinal(place)} in line", ordinal(place)) if reason in ("Priority", "Resources") else (reason,)
        return next((text for text in (f"{reason}, {ordinal(place)}", *short) if len(text) <= size), short[-1]), "dim"
    if row["state"] in ("RUNNING", "SUSPENDED"):
        if row["idle_at"] is not None:
            text = f"IDLE {span(max(0.0, state.now - row['idle_at']))}"
            done = "" if row["progress"] is None else f", {int(100 * row['progress'])}% done"
            return text + (done if len(text + done) <= size else ""), "warn"
        if row["reason"]:
            return str(row["reason"]), "warn"
        if row["progress"] is not None:
            text = row["progress_text"] or ""
            drawn = "".join(part for part, _ in bar(row["progress"], 6, state.is_ascii)) if size >= 18 else ""
            return f"{drawn} {row['progress']:.0%} {text}".strip(), ""
        return "", ""
    said = cause(row)
    if said and said != row["reason"]:
        return said, ""
    code = f"exit {row['exit_code']}" if row["exit_code"] else f"signal {row['signal']}" if row["signal"] else ""
    reason = "" if row["reason"] in (None, "None") else str(row["reason"])
    return " ".join(filter(None, (code, reason))), ""


_MINUTE_S = 60.0
_UNTOLD = {"unknown": "unknown", "pending": "not yet", "beyond": "far behind"}
"""What stands for an expected start that is not there."""


def _expected(row: dict[str, Any], now: float) -> Piece:
    """When a pending job or the next task starts, earliest to latest; when a running one ends."""
    found = row.get("expected")
    if found is not None and row["state"] != "PENDING":
        low_at = found["low_at"]
        return f"next {when(up_to_minute(found['high_at'], now) if low_at is None else low_at, now)}", ""
    if row["state"] == "PENDING":
        if found is None:
            return _UNTOLD.get(row.get("expected_is", ""), ""), "dim"
        low_at, high_at = found["low_at"], found["high_at"]
        high = None if high_at is None else when(up_to_minute(high_at, now), now)
        if low_at is None or (high_at is not None and high_at - low_at < _MINUTE_S):
            return f"{high}", ""
        low = when(low_at, now)
        return (f"{low}-{high}" if high is not None and len(f"{low}-{high}") <= 12 else f"from {low}"), ""
    if row["state"] != "RUNNING" or row["tasks"]:
        return "", ""
    if row["eta_at"] is not None:
        return f"~{when(row['eta_at'], now)}", "good"
    if row["time_limit_s"] is not None and row["start_at"] is not None:
        ends_at = row["start_at"] + row["time_limit_s"] + (row["suspended_s"] or 0.0)
        return f"by {when(ends_at, now)}", "dim"
    return "", ""


# --- details and log ------------------------------------------------------------------------------


def _details(state: TopState, width: int) -> list[Line]:
    """What is known of the row under the cursor, the most important first."""
    row = state.row()
    if row is None or state.pane != "jobs":
        return []
    head = [f"{row['id']} {clean(row['name'], 40)}"]
    asked = f"{row['gpus']} GPU{'s' * (row['gpus'] != 1)} {row['cpus']:g} core{'s' * (row['cpus'] != 1)}"
    if row["mem_mib"]:
        asked += f" {row['mem_mib'] / _MIB_PER_GIB:.3g}G"
    head.append(asked)
    limit = row["time_limit_s"]
    if row["state"] == "RUNNING" and limit and row["start_at"]:
        used = (state.now - row["start_at"]) / limit
        head.append(f"limit {_limit(limit)}, {used:.0%} used")
    elif limit:
        head.append(f"limit {_limit(limit)}")
    else:
        head.append("no time limit")
    head.append(f"{clean(row['queue'], 16)}/{clean(row['account'] or '-', 16)}")
    if row["where"]:
        head.append(clean(row["where"]))
    if row["restarts"]:
        head.append(f"restarted {row['restarts']} time{'s' * (row['restarts'] > 1)}")
    if row["nice"]:
        head.append(f"nice {row['nice']}")
    lines: list[Line] = [[(text, "title")] for text in wrapped(", ".join(head), width)]
    if row["progress"] is not None:
        lines.append([(clean(f"progress {row['progress']:.1%} {row['progress_text'] or ''}", width), "")])
    why = state.why if state.why is not None and state.why.get("id") == row["id"] else None
    text = (why or {}).get("text") or row["reason_text"]
    if text:
        lines += [[(one, "")] for one in wrapped(clean(text), width)]
    if why is not None:
        for one in why.get("alternatives", ()):
            at = "" if one["starts"] == "now" else f" ({when(one['starts'], state.now)})"
            advice = clean(f"{one['text']}{at}")
            lines += [[(part, "good")] for part in wrapped(advice, width)]
    return lines


def _limit(seconds: int) -> str:
    """As typed for -t: `45m`, `12h`, `1d12h`."""
    found = ""
    for unit, size in (("d", 86_400), ("h", 3600), ("m", 60), ("s", 1)):
        number, seconds = divmod(seconds, size)
        found += f"{number}{unit}" if number else ""
    return found or "0s"


def _log(state: TopState, width: int, room: int) -> list[Line]:
    log = state.log
    assert log is not None
    title = f"output of {clean(log.job)} " + (f"({clean(log.note)}) " if log.note else "")
    lines: list[Line] = [filled([(clean(title, width), "head")], width, "head")]
    last: Sequence[str] = list(log.lines)[-max(0, room - 1) :] if room > 1 else []
    lines += [[(clean(text, width), "")] for text in last]
    return [*lines, *blank(room - len(lines))]
