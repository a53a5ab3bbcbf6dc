"""The SQL of the job table. Lists of columns are in `codec`, so that a row and its statement agree."""

from __future__ import annotations

from collections.abc import Sequence

from gpusched.store.codec import (
    ESTIMATE_COLUMNS,
    EVENT_COLUMNS,
    IDENTITY_COLUMNS,
    JOB_COLUMNS,
    RESERVATION_COLUMNS,
    RUN_COLUMNS,
    STATE_COLUMNS,
    USAGE_COLUMNS,
)


def _insert(table: str, columns: Sequence[str]) -> str:
    return f"INSERT INTO {table} ({', '.join(columns)}) VALUES ({', '.join('?' for _ in columns)})"


def _upsert(table: str, columns: Sequence[str], key: Sequence[str]) -> str:
    changes = ", ".join(f"{name} = excluded.{name}" for name in columns if name not in key)
    return f"{_insert(table, columns)} ON CONFLICT ({', '.join(key)}) DO UPDATE SET {changes}"


PUT_JOB = _upsert("jobs", JOB_COLUMNS, IDENTITY_COLUMNS[:1])
MOVE_JOB = f"UPDATE jobs SET {', '.join(f'{name} = ?' for name in STATE_COLUMNS)} WHERE id = ?"
"""Where a job stands and nothing of what was asked: the documents are neither encoded nor checked again."""
PUT_RUN = _upsert("runs", RUN_COLUMNS, RUN_COLUMNS[:2])
TELL = _insert("job_events", EVENT_COLUMNS)
PUT_PAYLOAD = "INSERT INTO payloads (sha, body) VALUES (?, ?) ON CONFLICT (sha) DO NOTHING"
DRAIN = _upsert("drains", ("target", "message"), ("target",))
UNDRAIN = "DELETE FROM drains WHERE target = ?"

PUT_USAGE = _upsert("usage", USAGE_COLUMNS, USAGE_COLUMNS[:2])
PUT_RESERVATION = _upsert("reservations", RESERVATION_COLUMNS, RESERVATION_COLUMNS[:1])
DROP_RESERVATION = "DELETE FROM reservations WHERE name = ?"
PUT_ESTIMATE = _upsert("estimates", ESTIMATE_COLUMNS, ESTIMATE_COLUMNS[:1])

USAGE = f"SELECT {', '.join(USAGE_COLUMNS)} FROM usage ORDER BY account, user"
RESERVATIONS = f"SELECT {', '.join(RESERVATION_COLUMNS)} FROM reservations ORDER BY name"
ESTIMATES = f"SELECT {', '.join(ESTIMATE_COLUMNS)} FROM estimates ORDER BY job_id DESC LIMIT ?"
ACTIVE_JOBS = f"SELECT {', '.join(JOB_COLUMNS)} FROM jobs WHERE end_at IS NULL ORDER BY id"
OPEN_RUNS = f"SELECT {', '.join(RUN_COLUMNS)} FROM runs WHERE end_at IS NULL ORDER BY job_id, number"
JOBS = f"SELECT {', '.join(JOB_COLUMNS)} FROM jobs"
# A list arrives as one JSON document: there may be more ids than SQLite takes parameters.
RUNS_OF_JOBS = (
    f"SELECT {', '.join(RUN_COLUMNS)} FROM runs WHERE job_id IN (SELECT value FROM json_each(?)) "
    "ORDER BY job_id, number"
)
EVENTS_OF_JOB = f"SELECT {', '.join(EVENT_COLUMNS)} FROM job_events WHERE job_id = ? ORDER BY id"
DRAINS = "SELECT target, message FROM drains ORDER BY target"
PAYLOAD = "SELECT body FROM payloads WHERE sha = ?"
LAST_JOB_OF_USER = "SELECT max(id) FROM jobs WHERE uid = ?"
LARGEST_ID_EVER = "SELECT seq FROM sqlite_sequence WHERE name = 'jobs'"

SEE_NODE = """
    INSERT INTO nodes (name, driver_version, first_seen_at, last_seen_at) VALUES (:name, :driver, :at, :at)
    ON CONFLICT (name) DO UPDATE SET driver_version = excluded.driver_version, last_seen_at = excluded.last_seen_at
"""
SEE_GPU = """
    INSERT INTO gpus (uuid, node, "index", name, vram_total_mib, first_seen_at, last_seen_at)
    VALUES (:uuid, :node, :index, :name, :vram_total_mib, :at, :at)
    ON CONFLICT (uuid) DO UPDATE SET
        node = excluded.node, "index" = excluded."index", name = excluded.name,
        vram_total_mib = coalesce(excluded.vram_total_mib, vram_total_mib), last_seen_at = excluded.last_seen_at
"""
