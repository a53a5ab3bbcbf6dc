"""All metrics of `GET /v1/metrics`, by family; source of the reference page."""

from __future__ import annotations

from gpusched.model.metrics import MetricFamily

_NODE = ("node",)
_GPU = ("node", "gpu", "uuid")

UP = MetricFamily("gpusched_up", "gauge", "1 while the daemon answers, 0 while it does not.")
BUILD = MetricFamily("gpusched_build", "info", "The daemon's version.", ("version",))
STARTED = MetricFamily("gpusched_start_time_seconds", "gauge", "When the daemon started, UTC epoch.", unit="seconds")

TICK = MetricFamily("gpusched_tick_seconds", "histogram", "Duration of one scheduler tick.", unit="seconds")
STEP_FAILURES = MetricFamily(
    "gpusched_step_failures", "counter", "Internal errors of daemon steps; gpusched doctor names them."
)
TICK_FAILURES = MetricFamily("gpusched_tick_failures", "counter", "Ticks that failed or could not be committed.")
LAST_TICK = MetricFamily(
    "gpusched_last_tick_timestamp_seconds", "gauge", "When the last tick began, UTC epoch.", unit="seconds"
)
COMMIT = MetricFamily("gpusched_commit_seconds", "histogram", "Duration of one durable commit.", unit="seconds")
COMMIT_FAILURES = MetricFamily(
    "gpusched_commit_failures", "counter", "Commits that failed on the disk or the database."
)
WRITABLE = MetricFamily("gpusched_store_writable", "gauge", "0 after the last commit failed, else 1.")
STORE_SIZE = MetricFamily("gpusched_store_size_bytes", "gauge", "Database with its write-ahead log.", unit="bytes")
EVENTS = MetricFamily(
    "gpusched_engine_events", "counter", "Events of runs reported by the engine, by kind.", ("event",)
)
ALERTS_WAITING = MetricFamily("gpusched_alerts_waiting", "gauge", "Alerts in the outbox that are not delivered yet.")
ALERTS_DROPPED = MetricFamily("gpusched_alerts_dropped", "counter", "Alerts dropped because the outbox was full.")

JOBS = MetricFamily("gpusched_jobs", "gauge", "Unfinished jobs; tasks of arrays count one by one.", ("queue", "state"))
REASONS = MetricFamily("gpusched_jobs_pending", "gauge", "Pending jobs by reason, as in gq.", ("reason",))
SUBMITTED = MetricFamily("gpusched_jobs_submitted", "counter", "Jobs recorded since the daemon started.")
FINISHED = MetricFamily("gpusched_jobs_finished", "counter", "Jobs that ended since the daemon started.", ("state",))
WAIT = MetricFamily(
    "gpusched_wait_seconds",
    "histogram",
    "Time from when a job was eligible until it started; each run counts.",
    ("queue",),
    unit="seconds",
)
QUEUE_GPUS = MetricFamily(
    "gpusched_queue_gpus", "gauge", "GPUs held by jobs of the queue; shared GPUs count fractionally.", ("queue",)
)

NODE_DRAINED = MetricFamily("gpusched_node_drained", "gauge", "1 while the node takes no new work.", _NODE)
NODE_CPUS = MetricFamily("gpusched_node_cpus", "gauge", "Schedulable cores.", _NODE)
NODE_CPUS_BOOKED = MetricFamily("gpusched_node_cpus_booked", "gauge", "Cores that runs hold.", _NODE)
NODE_MEMORY = MetricFamily("gpusched_node_memory_bytes", "gauge", "Schedulable memory.", _NODE, unit="bytes")
NODE_MEMORY_BOOKED = MetricFamily(
    "gpusched_node_memory_booked_bytes", "gauge", "Memory that runs hold.", _NODE, unit="bytes"
)
GPU_READING = MetricFamily(
    "gpusched_gpu_reading_timestamp_seconds", "gauge", "When the GPUs were last read, UTC epoch.", _NODE, unit="seconds"
)
GPU_DRIVER = MetricFamily("gpusched_gpu_driver_up", "gauge", "0 while the driver cannot be read at all.", _NODE)

GPU = MetricFamily("gpusched_gpu", "info", "The model of a card.", (*_GPU, "name"))
GPU_STATE = MetricFamily(
    "gpusched_gpu_state", "gauge", "1 for the current state as in ginfo, 0 for the others.", (*_GPU, "state")
)
GPU_BOOKED = MetricFamily(
    "gpusched_gpu_booked_ratio", "gauge", "Fraction of the card held by runs, 0 to 1.", _GPU, unit="ratio"
)
GPU_RUNS = MetricFamily("gpusched_gpu_runs", "gauge", "Runs that hold the card or a share of it.", _GPU)
GPU_UTILISATION = MetricFamily(
    "gpusched_gpu_utilisation_ratio", "gauge", "Fraction of time in which some kernel ran, 0 to 1.", _GPU, unit="ratio"
)
GPU_MEMORY = MetricFamily(
    "gpusched_gpu_memory_bytes", "gauge", "VRAM without the driver's reserve.", _GPU, unit="bytes"
)
GPU_MEMORY_USED = MetricFamily(
    "gpusched_gpu_memory_used_bytes", "gauge", "VRAM that processes use.", _GPU, unit="bytes"
)
GPU_MEMORY_FOREIGN = MetricFamily(
    "gpusched_gpu_memory_foreign_bytes", "gauge", "VRAM used without a booking, at its recent peak.", _GPU,
    unit="bytes",
)  # fmt: skip
GPU_TEMPERATURE = MetricFamily("gpusched_gpu_temperature_celsius", "gauge", "Temperature.", _GPU, unit="celsius")
GPU_POWER = MetricFamily("gpusched_gpu_power_watts", "gauge", "Power drawn.", _GPU, unit="watts")

USER_JOBS = MetricFamily("gpusched_user_jobs", "gauge", "Unfinished jobs of a user.", ("user", "state"))
USER_GPUS = MetricFamily(
    "gpusched_user_gpus", "gauge", "GPUs held by a user's jobs; shared GPUs count fractionally.", ("user",)
)
USER_GPU_SECONDS = MetricFamily(
    "gpusched_user_gpu_seconds",
    "counter",
    "GPU-seconds held since the daemon started, for users who held a GPU within the last day.",
    ("user",),
    unit="seconds",
)

FAMILIES = tuple(value for value in list(globals().values()) if isinstance(value, MetricFamily))
