"""The SQL of the job table. Column lists are in `rows`, so that a row and its statement agree."""

from __future__ import annotations

from collections.abc import Sequence

from gpusched.store import rows
from gpusched.store.rows import IDENTITY_COLUMNS, JOB_COLUMNS, STATE_COLUMNS, USAGE_COLUMNS

ALERT_COLUMNS = rows.ALERTS.names
BATCH_COLUMNS = rows.BATCHES.names
CLEARANCE_COLUMNS = rows.CLEARANCES.names
ESTIMATE_COLUMNS = rows.ESTIMATES.names
EVENT_COLUMNS = rows.EVENTS.names
PIPELINE_COLUMNS = rows.PIPELINES.names
RESERVATION_COLUMNS = rows.RESERVATIONS.names
RUN_COLUMNS = rows.RUNS.names
STEP_COLUMNS = rows.STEPS.names


def _insert(table: str, columns: Sequence[str]) -> str:
    return f"INSERT INTO {table} ({', '.join(columns)}) VALUES ({', '.join('?' for _ in columns)})"


def _upsert(table: str, columns: Sequence[str], key: Sequence[str]) -> str:
    changes = ", ".join(f"{name} = excluded.{name}" for name in columns if name not in key)
    return f"{_insert(table, columns)} ON CONFLICT ({', '.join(key)}) DO UPDATE SET {changes}"


PUT_JOB = _upsert("jobs", JOB_COLUMNS, IDENTITY_COLUMNS[:1])
MOVE_JOB = f"UPDATE jobs SET {', '.join(f'{name} = ?' for name in STATE_COLUMNS)} WHERE id = ?"
"""The state of a job and nothing of its spec: documents are neither encoded nor checked again."""
PUT_RUN = _upsert("runs", RUN_COLUMNS, RUN_COLUMNS[:2])
TELL = _insert("job_events", EVENT_COLUMNS)
PUT_PAYLOAD = "INSERT INTO payloads (sha, body) VALUES (?, ?) ON CONFLICT (sha) DO NOTHING"
DRAIN = _upsert("drains", ("target", "message"), ("target",))
UNDRAIN = "DELETE FROM drains WHERE target = ?"
PUT_DRAINER = _upsert("drainers", ("target", "user", "at"), ("target",))
DROP_DRAINER = "DELETE FROM drainers WHERE target = ?"
PUT_MIG_LAYOUT = _upsert("mig_layouts", ("uuid", "document"), ("uuid",))
DROP_MIG_LAYOUT = "DELETE FROM mig_layouts WHERE uuid = ?"
PUT_FENCE = _upsert("fences", ("job_id", "fence_at"), ("job_id",))
DROP_FENCE = "DELETE FROM fences WHERE job_id = ?"
PUT_KEPT_PLACE = _upsert("kept_places", ("job_id", "place"), ("job_id",))
DROP_KEPT_PLACE = "DELETE FROM kept_places WHERE job_id = ?"
PUT_TABLE_SETTING = _upsert("table_settings", ("kind", "name", "document"), ("kind", "name"))
DROP_TABLE_SETTING = "DELETE FROM table_settings WHERE kind = ? AND name = ?"
PUT_CLEARANCE = _upsert("gpu_clearances", CLEARANCE_COLUMNS, CLEARANCE_COLUMNS[:1])

PUT_USAGE = _upsert("usage", USAGE_COLUMNS, USAGE_COLUMNS[:2])
PUT_RESERVATION = _upsert("reservations", RESERVATION_COLUMNS, RESERVATION_COLUMNS[:1])
DROP_RESERVATION = "DELETE FROM reservations WHERE name = ?"
PUT_ESTIMATE = _upsert("estimates", ESTIMATE_COLUMNS, ESTIMATE_COLUMNS[:1])
PUT_PIPELINE = _insert("pipelines", PIPELINE_COLUMNS)
PUT_BATCH = _upsert("batches", BATCH_COLUMNS, ("first_id",))
DROP_BATCH = "DELETE FROM batches WHERE first_id = ?"
PUT_ALERT = _upsert("alerts", ALERT_COLUMNS, ALERT_COLUMNS[:1])
DROP_ALERT = "DELETE FROM alerts WHERE key = ?"
PUT_STEP = _upsert("steps", STEP_COLUMNS, STEP_COLUMNS[:3])

USAGE = f"SELECT {', '.join(USAGE_COLUMNS)} FROM usage ORDER BY account, user"
RESERVATIONS = f"SELECT {', '.join(RESERVATION_COLUMNS)} FROM reservations ORDER BY name"
ESTIMATES = f"SELECT {', '.join(ESTIMATE_COLUMNS)} FROM estimates ORDER BY job_id DESC LIMIT ?"
ALERTS = f"SELECT {', '.join(ALERT_COLUMNS)} FROM alerts ORDER BY at, key"
ACTIVE_JOBS = f"SELECT {', '.join(JOB_COLUMNS)} FROM jobs WHERE end_at IS NULL ORDER BY id"
OPEN_RUNS = f"SELECT {', '.join(RUN_COLUMNS)} FROM runs WHERE end_at IS NULL ORDER BY job_id, number"
JOBS = f"SELECT {', '.join(JOB_COLUMNS)} FROM jobs"
ENDED_SINCE_OF_FEW = "(end_at IS NULL OR end_at >= :since)"
# The same by the index on ends: with OR and an order by id, SQLite reads the whole table.
ENDED_SINCE = "id IN (SELECT id FROM jobs WHERE end_at IS NULL UNION ALL SELECT id FROM jobs WHERE end_at >= :since)"
# A list arrives as one JSON document: there may be more ids than SQLite takes parameters.
ONE_OF = "{0} IN (SELECT value FROM json_each(:{0}))"
# The tasks of a sweep have names of their own, and are found by that of their array, too.
NAMED = (
    f"({ONE_OF.format('name')} OR array_id IN "
    f"(SELECT id FROM jobs WHERE tasks_left IS NOT NULL AND {ONE_OF.format('name')}))"
)
RUNS_OF_JOBS = (
    f"SELECT {', '.join(RUN_COLUMNS)} FROM runs WHERE job_id IN (SELECT value FROM json_each(?)) "
    "ORDER BY job_id, number"
)
OPEN_STEPS = f"SELECT {', '.join(STEP_COLUMNS)} FROM steps WHERE end_at IS NULL ORDER BY job_id, run, number"
STEPS_OF_JOBS = (
    f"SELECT {', '.join(STEP_COLUMNS)} FROM steps WHERE job_id IN (SELECT value FROM json_each(?)) "
    "ORDER BY job_id, run, number"
)
NEXT_STEP = "SELECT coalesce(max(number), -1) + 1 FROM steps WHERE job_id = ? AND run = ?"
EVENTS_OF_JOB = f"SELECT {', '.join(EVENT_COLUMNS)} FROM job_events WHERE job_id = ? ORDER BY id"
DRAINERS = "SELECT target, user, at FROM drainers ORDER BY target"
MIG_LAYOUTS = "SELECT document FROM mig_layouts ORDER BY uuid"
DRAINS = "SELECT target, message FROM drains ORDER BY target"
KNOWN_PAYLOADS = "SELECT sha FROM payloads WHERE sha IN (SELECT value FROM json_each(?))"
PAYLOAD_BYTES_OF_USER = """
    SELECT total(length(body)) FROM payloads WHERE sha IN (
        SELECT json_extract(launch, '$.script_sha') FROM jobs WHERE uid = :uid
        UNION SELECT json_extract(launch, '$.env_sha') FROM jobs WHERE uid = :uid)
"""
FENCES = "SELECT job_id, fence_at FROM fences ORDER BY job_id"
KEPT_PLACES = "SELECT job_id, place FROM kept_places ORDER BY job_id"
TABLE_SETTINGS = "SELECT kind, name, document FROM table_settings ORDER BY kind, name"
CLEARANCES = f"SELECT {', '.join(CLEARANCE_COLUMNS)} FROM gpu_clearances ORDER BY uuid"
PAYLOAD = "SELECT body FROM payloads WHERE sha = ?"
TASK_TALLIES = """
    SELECT array_id, state, count(*), max(exit_code) FROM jobs
    WHERE array_id IN (SELECT value FROM json_each(?)) AND end_at IS NOT NULL GROUP BY array_id, state
"""
ARRAY_BEFORE = (
    f"SELECT {', '.join(JOB_COLUMNS)} FROM jobs WHERE id < ? AND tasks_left IS NOT NULL ORDER BY id DESC LIMIT 1"
)
USE_IDS_UP = "UPDATE sqlite_sequence SET seq = max(seq, ?) WHERE name = 'jobs'"
LAST_JOB_OF_USER = "SELECT max(id) FROM jobs WHERE uid = ?"
JOB_OF_KEY = (
    f"SELECT {', '.join(JOB_COLUMNS)} FROM jobs WHERE uid = ? AND key = ? AND array_id IS NULL ORDER BY id DESC LIMIT 1"
)
ENDED_JOBS = f"{JOBS} WHERE end_at < ? AND (end_at, id) > (?, ?) ORDER BY end_at, id LIMIT ?"
OPEN_BATCHES = f"SELECT {', '.join(BATCH_COLUMNS)} FROM batches WHERE made < jobs ORDER BY first_id"
BATCH_OF_KEY = (
    f"SELECT {', '.join(BATCH_COLUMNS)} FROM batches WHERE uid = ? AND key = ? ORDER BY first_id DESC LIMIT 1"
)
STATES_OF_BATCH = "SELECT DISTINCT state FROM jobs WHERE id BETWEEN ? AND ?"
PRUNE_BATCHES = """
    DELETE FROM batches WHERE made = jobs
        AND NOT EXISTS (SELECT 1 FROM jobs WHERE id BETWEEN first_id AND first_id + batches.jobs - 1)
"""
PIPELINE_ENDS = "SELECT id, end_at FROM jobs WHERE pipeline = ? ORDER BY id"
PRUNE_JOBS = "DELETE FROM jobs WHERE id IN (SELECT value FROM json_each(?))"
PRUNE_PIPELINES = "DELETE FROM pipelines WHERE number IN (SELECT value FROM json_each(?))"
USED_PAYLOADS = """
    SELECT id, json_extract(launch, '$.script_sha'), json_extract(launch, '$.env_sha')
    FROM jobs WHERE id > ? ORDER BY id LIMIT ?
"""
PAYLOAD_SHAS = "SELECT sha FROM payloads WHERE sha > ? ORDER BY sha LIMIT ?"
DROP_PAYLOADS = """
    DELETE FROM payloads WHERE sha IN (SELECT value FROM json_each(?))
        AND sha NOT IN (SELECT lines_sha FROM batches WHERE made < jobs)
"""
LARGEST_ID_EVER = "SELECT seq FROM sqlite_sequence WHERE name = 'jobs'"
PIPELINES = (
    f"SELECT {', '.join(PIPELINE_COLUMNS)} FROM pipelines WHERE number IN (SELECT value FROM json_each(?)) "
    "ORDER BY number"
)
LAST_PIPELINE = "SELECT seq FROM sqlite_sequence WHERE name = 'pipelines'"

CARD_SIZES = "SELECT uuid, vram_total_mib FROM gpus WHERE vram_total_mib IS NOT NULL"
# Only jobs that had not ended before are looked at, by their index; runs are grouped by what they hold of GPUs, of
# which there are few kinds, so that no list of cards is read twice.
USAGE_SUMS = """
    WITH picked AS MATERIALIZED (
        SELECT id, {by} AS name, queued_at, suspended_at FROM jobs WHERE {where}
    ), held AS (
        SELECT name, number, gpus, cpus, mem_mib, start_at, queued_at, energy_j,
            json_extract(measured, '$.cost') AS cost, json_extract(measured, '$.grams') AS grams,
            max(0.0, min(coalesce(end_at, :now), :now) - max(start_at, :since)) AS inside_s,
            coalesce(end_at, :now) - start_at AS whole_s,
            suspended_s + iif(end_at IS NULL, max(0.0, :now - coalesce(suspended_at, :now)), 0.0) AS still_s
        FROM picked CROSS JOIN runs ON job_id = id
        WHERE start_at < :now AND (end_at IS NULL OR end_at >= :since)
    ), moved AS (
        SELECT *, iif(whole_s > 0, inside_s * max(0.0, 1.0 - still_s / whole_s), 0.0) AS seconds,
            iif(whole_s > 0, inside_s / whole_s, NULL) AS part,
            iif(number = 1 AND start_at >= :since, max(0.0, start_at - queued_at), NULL) AS wait_s
        FROM held
    )
    SELECT name, gpus, count(*), total(seconds), total(seconds * cpus), total(seconds * mem_mib),
        total(wait_s), count(wait_s), sum(energy_j * part), sum(cost * part), sum(grams * part)
    FROM moved GROUP BY name, gpus
"""
CARD_MODELS = "SELECT uuid, name, vram_total_mib FROM gpus"
_INSIDE = """
    start_at < :until AND (runs.end_at IS NULL OR runs.end_at > :since OR start_at >= :since)
"""
ACCOUNT_USES = f"""
    WITH picked AS MATERIALIZED (
        SELECT id, account, user, suspended_at FROM jobs
        WHERE (end_at IS NULL OR end_at >= :since) AND (:user IS NULL OR user = :user)
    ), held AS (
        SELECT account, user, gpus, cpus, cpu_s, energy_j, mean_utilisation, runs.end_at IS NULL AS is_open,
            json_extract(measured, '$.cost') AS cost, json_extract(measured, '$.grams') AS grams,
            native IS NOT NULL OR is_filler OR coalesce(outcome, '') = 'NODE_FAIL'
                OR coalesce(reason, '') = 'Preempted' AS is_free, is_filler,
            max(0.0, min(coalesce(runs.end_at, :now), :until) - max(start_at, :since)) AS inside_s,
            coalesce(runs.end_at, :now) - start_at AS whole_s,
            suspended_s + iif(runs.end_at IS NULL, max(0.0, :now - coalesce(suspended_at, :now)), 0.0) AS still_s
        FROM picked CROSS JOIN runs ON job_id = id WHERE {_INSIDE}
    ), moved AS (
        SELECT *, iif(whole_s > 0, inside_s / whole_s, 0.0) AS part,
            iif(whole_s > 0, inside_s / whole_s * max(0.0, whole_s - still_s), 0.0) AS seconds
        FROM held
    )
    SELECT account, user, gpus, is_free, is_filler, count(*), sum(is_open), total(seconds),
        sum(seconds * mean_utilisation), total(seconds * cpus), sum(cpu_s * part), sum(energy_j * part),
        sum(cost * part), sum(grams * part)
    FROM moved GROUP BY account, user, gpus, is_free, is_filler
"""
ACCOUNT_JOBS = f"""
    SELECT account, user, count(*) FROM jobs
    WHERE (end_at IS NULL OR end_at >= :since) AND (:user IS NULL OR user = :user)
        AND EXISTS (SELECT 1 FROM runs WHERE job_id = id AND {_INSIDE})
    GROUP BY account, user
"""
BUDGET_SUMS = """
    WITH picked AS MATERIALIZED (
        SELECT id, account, user FROM jobs WHERE end_at IS NULL OR end_at >= :since
    ), held AS (
        SELECT account, user, gpus, max(0.0, min(runs.end_at, :now) - max(runs.start_at, :since)) AS inside_s,
            runs.end_at - runs.start_at AS whole_s, suspended_s
        FROM picked CROSS JOIN runs ON job_id = id
        WHERE runs.end_at >= :since AND runs.start_at IS NOT NULL AND native IS NULL AND NOT is_filler
            AND coalesce(outcome, '') != 'NODE_FAIL' AND coalesce(reason, '') != 'Preempted'
    )
    SELECT account, user, gpus,
        total(iif(whole_s > 0, inside_s * max(0.0, 1.0 - suspended_s / whole_s), 0.0))
    FROM held GROUP BY account, user, gpus
"""
USAGE_JOBS = """
    SELECT {by}, count(*) FROM jobs
    WHERE {where} AND EXISTS (
        SELECT 1 FROM runs WHERE job_id = id AND start_at < :now AND (runs.end_at IS NULL OR runs.end_at >= :since))
    GROUP BY {by}
"""

LAST_GPUS = """
    SELECT uuid, "index", gpus.name, vram_total_mib FROM gpus JOIN nodes ON node = nodes.name
    WHERE gpus.last_seen_at = nodes.last_seen_at AND nodes.last_seen_at = (SELECT max(last_seen_at) FROM nodes)
    ORDER BY "index"
"""
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
