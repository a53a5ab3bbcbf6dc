"""gshow: everything about one job."""

from __future__ import annotations

import os
import stat
import sys
import time

from gpusched.cli import output, tables
from gpusched.cli.options import gshow_table
from gpusched.cli.query import ids_in, places, quote
from gpusched.client import connect
from gpusched.errors import Forbidden, NotFound
from gpusched.instants import instant
from gpusched.model.units import (
    format_duration,
    format_size_mib,
    gpu_label,
    gpu_list,
    parse_pipeline_id,
    plural,
    printable,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from gpusched.cli.parse import Values
    from gpusched.client import DaemonConnection


_MOST_FILES = 16
"""Output files of one run that are listed."""


def main() -> int:
    return output.run("gshow", body)


def _each(client: DaemonConnection, word: str) -> list[str]:
    """The jobs that a word means, one by one: `221-230` and `42_[3-5]` are several."""
    if "-" not in word and "[" not in word:
        return [word]
    answer = client.call("GET", f"/v1/jobs?fields=id&ids={quote(word)}")
    if not answer["rows"]:
        raise NotFound(f"there is no job of {printable(word, 60)}", "list the jobs with: gq -a")
    output.note_missing("gshow", answer)
    return [row[0] for row in answer["rows"]]


@output.command(gshow_table)
def body(values: Values, operands: list[str]) -> int:
    asked = ids_in(operands) or ["@"]
    if "graph" in values or any(parse_pipeline_id(word) is not None for word in asked):
        from gpusched.cli.pipelines import show  # rarely used

        return show(asked, values)
    with connect() as client:
        asked = [one for word in asked for one in _each(client, word)]
        if values.get("script"):
            for word in asked:
                answer = client.call("GET", f"/v1/jobs/{quote(word)}/script")
                text = answer["script"]
                if text is None:
                    import shlex

                    text = shlex.join(answer["argv"]) + "\n"
                sys.stdout.buffer.write(text.encode("utf-8", "surrogateescape"))
            return 0
        jobs = [client.call("GET", f"/v1/jobs/{quote(word)}")["job"] for word in asked]
        for job in jobs:
            for run in job["runs"]:
                run["series"] = []
            if any(run["gpus"] for run in job["runs"]):
                from gpusched.cli.sparklines import add_series

                add_series(client, job)
        if not values.get("json"):
            for job in jobs:
                if job["spec"] and job["runs"] and max(job["num_tasks"] or 1, job["nodes"] or 1) > 1:
                    _add_outputs(client, job)
    for job in jobs:
        if job["snapshot"]:
            job["snapshot_about"] = snapshot_about(job)
        for run in job["runs"]:
            run["tracker_url"] = tracker_url(run)
    if not output.show(values, {"jobs": jobs}, ()):
        sys.stdout.write("\n".join(describe(job) for job in jobs))
    return 0


def _add_outputs(client: DaemonConnection, job: dict[str, Any]) -> None:
    """Give the runs of a job with several processes all files that they write to, as far as this caller may know."""
    try:
        found = client.call("GET", f"/v1/logs?ids={quote(job['id'])}")["jobs"]
    except Forbidden:
        return
    files = {run["run"]: run["outputs"] for one in found if one["id"] == job["id"] for run in one["runs"]}
    for run in job["runs"]:
        run["files"] = files.get(run["run"], [])


def _active(job: dict[str, Any]) -> list[tuple[str, str]]:
    """The environment that the job asked for, and its programs around the command."""
    launch = job["spec"]["launch"] if job["spec"] else {}
    environment = [("Environment", f"{kind} {launch[kind]}") for kind in ("venv", "conda") if launch.get(kind)]
    return environment + [(kind.title(), launch[kind]) for kind in ("prolog", "epilog") if launch.get(kind)]


def describe(job: dict[str, Any]) -> str:
    """All facts of one job as text."""
    now = time.time()
    is_deferred = job["state"] == "PENDING" and job["eligible_at"] > now
    progress = job["progress"], job["progress_text"], job["eta_at"], now
    alerting = (job["spec"] or {}).get("alerting")
    pairs = [
        ("Job", f"{job['id']} ({job['name']})"),
        *_row("Values", ", ".join(f"{name}={value}" for name, value in (job["sweep"] or {}).items())),
        ("User", f"{job['user']}, account {_account(job)}, queue {job['queue']}{_terms(job)}"),
        *_row("Comment", job["comment"]),
        *_row("Key", job["key"]),
        ("State", _state(job)),
        *_row("Tasks", _tasks(job) if job["tasks"] else ""),
        *_row("Pipeline", _pipeline(job)),
        *_row("Dependency", job["dependency"]),
        ("Command", job["command"]),
        ("Directory", job["work_dir"]),
        *_image(job),
        *_active(job),
        *_row("Input", job["stdin_path"]),
        ("Output", job["stdout_path"] + _rotation(job["spec"]["launch"]) if job["spec"] else "-"),
        # Both paths are masked in other users' jobs.
        *_row("Errors", job["stderr_path"] if job["stderr_path"] != job["stdout_path"] else ""),
        ("Requested", _requested(job)),
        *_row("Variants", " | ".join(one["name"] for one in job["variants"])),
        *_row("Where", _where(job)),
        ("Submitted", instant(job["submit_at"])),
        ("Started", instant(job["start_at"])),
        *_row("Progress", "" if job["progress"] is None else tables.sentence(*progress)),
        ("Ended", instant(job["end_at"])),
        ("Exit", _exit(job)),
        ("Retries", f"{job['failures']} of {job['retries']} used" if job["retries"] else "none"),
        *_row("Snapshot", snapshot_line(job["snapshot_about"], job["snapshot"]) if job["snapshot"] else ""),
        *_row("Deadline", "" if job["deadline_at"] is None else instant(job["deadline_at"])),
        *_row("Expected", _expected(job)),
        *_row("Not before", instant(job["eligible_at"]) if is_deferred else ""),
        *_row("Alerts", "" if alerting is None else _tells(alerting)),
        *_related(job),
        *(attended(job) if job["foreground"] is not None else ()),
        *_shares(job),
    ]
    if job["report"] is not None:
        pairs.extend(("Used" if not at else "", line) for at, line in enumerate(job["report"]["lines"]))
    lines = [tables.folded(f"{name + ':' if name else '':<11} {printable(str(value))}", 12) for name, value in pairs]
    for run in job["runs"]:
        lines.extend(map(tables.folded, _describe_run(run)))
    if job["spec"] is None:
        lines.append(f"This job belongs to {job['user']}; its command and history are hidden from other users.")
        return "\n".join(lines) + "\n"
    lines.append("History:")
    for event in job["events"]:
        of_run = f" (run {event['run']})" if event["run"] else ""
        lines.append(tables.folded(f"  {instant(event['at'])}  {printable(event['text'])}{of_run}", 23))
    return "\n".join(lines) + "\n"


def _row(name: str, value: str | None) -> list[tuple[str, str]]:
    """A row for what not every job has."""
    return [(name, value)] if value else []


def _pipeline(job: dict[str, Any]) -> str:
    of = "step" if job["fallback_of"] is None else "fallback of step"
    return f"{job['pipeline']}, {of} {job['step']}" if job["pipeline"] else ""


def _expected(job: dict[str, Any]) -> str:
    if not job.get("expected"):
        return ""
    from gpusched.cli.forecast import expected_text  # rarely needed

    text = expected_text(job["expected"])
    return f"to run {text}" if text else ""


def _tasks(job: dict[str, Any]) -> str:
    """Number of tasks of an array in each state, and the tasks that have not started."""
    text = ", ".join(f"{count} {state}" for state, count in job["tasks"].items())
    left = f" (not started: {job['tasks_left']})" if job["tasks_left"] else ""
    return text + left + (f", at most {job['throttle']} at once" if job["throttle"] else "")


def _tells(alerting: dict[str, Any]) -> str:
    """The events that alert the owner, and the targets unless all are used."""
    return ", ".join(alerting["on"]) + (f" to {', '.join(alerting['targets'])}" if alerting["targets"] else "")


def _related(job: dict[str, Any]) -> list[tuple[str, str]]:
    """The job's fallback, planned or submitted, and the job that it is a fallback of."""
    pairs = [("Fallback", job["fallback"])] if job["fallback"] else []
    for other in job["related"]:
        name = "Fallback" if other["relation"] == "fallback" else "Follows"
        why = f": {other['reason_text']}" if name == "Follows" and other["reason_text"] else ""
        pairs.append((name, f"job {other['id']} ({other['state']}{why}), output {other['stdout_path']}"))
    return pairs


def _shares(job: dict[str, Any]) -> list[tuple[str, str]]:
    """An open run's use of each card it shares, and how its booking is enforced."""
    found = []
    for gpu in job["gpus"]:
        if gpu["enforcement"] is not None:
            kept = f"{gpu['enforcement']} ({gpu['enforcement_why']})"
            if gpu["vram_mib"] is not None:  # None: a MIG instance, which is entirely the job's
                held = format_size_mib(gpu["vram_used_mib"])
                sms = (
                    f", at most {gpu['fraction']:.0%} of its SMs"
                    if gpu["enforcement"] == "MPS" and gpu["fraction"]
                    else ""
                )
                kept = f"holds {held} of {format_size_mib(gpu['vram_mib'])} booked{sms}; {kept}"
            found.append(("Shares", f"GPU {gpu_label(gpu['index'])}: {kept}"))
    found += [("VRAM", job["vram_over"])] if job["vram_over"] else []
    found += [("Unbooked", f"uses {_held(gpu)}, which it did not book") for gpu in job["unbooked_gpus"]]
    return found + [("Foreign", f"{_intruder(one)} on {_held(one)}") for one in job["intruders"]]


def _held(gpu: dict[str, Any]) -> str:
    """A GPU, and the memory held on it."""
    return f"GPU {gpu_label(gpu['index'])} ({format_size_mib(gpu['vram_mib'])})"


def _intruder(one: dict[str, Any]) -> str:
    """A process on a GPU of the job without a booking."""
    if one["job"] is not None:
        from gpusched.cli.ginfo import owner_of

        return owner_of(one["job"]) + ","
    known = ", ".join(word for word in (one["name"], one["user"] and f"of {one['user']}") if word)
    return f"process {one['pid']}" + (f" ({known})" if known else "")


def _state(job: dict[str, Any]) -> str:
    reason = f" ({job['reason']})" if _has_reason(job) else ""
    text = f": {job['reason_text']}" if reason and job["reason_text"] else ""
    return f"{job['state']}{reason}{text}"


def _has_reason(job: dict[str, Any]) -> bool:
    return bool(job["reason"]) and job["reason"] != "None"


def _requested(job: dict[str, Any]) -> str:
    parts = [plural(job["cpus"], "CPU")]
    if job["num_tasks"] > job["nodes"]:
        parts.insert(0, plural(job["num_tasks"], "task"))
    if job["gpu_request"] != "0":
        parts.append(f"GPUs {job['gpu_request']}{' linked' if job['gpus_linked'] else ''}")
    if job["mem_mib"]:
        parts.append(f"memory {format_size_mib(job['mem_mib'])}")
    parts.extend(f"{name} {number}" for name, number in job["resources"].items())
    parts.extend(f"license {name} {number}" for name, number in job["licenses"].items())
    source = job["time_limit_source"]
    shown = f" ({source})" if source in ("auto", "default", "maximum") else ""
    parts.append(f"time limit {format_duration(job['time_limit_s'])}{shown}")
    return ", ".join(parts)


def _account(job: dict[str, Any]) -> str:
    """The account, and where its use counts if it is only a label: no account was configured at submission."""
    account, charged = job["account"] or "-", job["charged_account"]
    return account if charged in (job["account"], None) else f"{account} (a label; its use counts for {charged})"


def _terms(job: dict[str, Any]) -> str:
    qos = f", QOS {job['qos']}" if job["qos"] else ""
    return qos + (f", reservation {job['reservation']}" if job["reservation"] else "")


def _nodes(job: dict[str, Any]) -> str:
    """Number of nodes, and what each of them gives; empty for one."""
    if job["nodes_max"]:
        return f"{job['nodes']} to {job['nodes_max']} nodes, as few as have room when it starts"
    if job["nodes"] == 1:
        return ""
    if job["total_gpus"] != job["gpus_per_node"] * job["nodes"]:
        return f"{job['nodes']} nodes, with at most {job['gpus_per_node']} of the GPUs each"
    return f"{job['nodes']} nodes, each with {job['gpus_per_node']} of the GPUs and everything else in full"


def _where(job: dict[str, Any]) -> str:
    """The job's requirements on nodes; empty if any node will do."""
    parts = [
        _nodes(job),
        f"only on {','.join(job['nodelist'])}" if job["nodelist"] else "",
        f"not on {','.join(job['exclude'])}" if job["exclude"] else "",
        f"requires {job['constraint']}" if job["constraint"] else "",
        f"prefers {job['prefer']}" if job["prefer"] else "",
        f"near data {', '.join(job['near'])}" if job["near"] else "",
        "exclusive" if job["exclusive"] else "",
    ]
    return "; ".join(part for part in parts if part)


def _image(job: dict[str, Any]) -> list[tuple[str, str]]:
    """The image of its container, and which one that is by its digest."""
    launch = (job["spec"] or {}).get("launch") or {}
    if not launch.get("image"):
        return []
    pinned = launch["image_digest"]
    return [("Image", launch["image"] + (f", pinned as {pinned}" if pinned else ""))]


def _rotation(launch: dict[str, Any]) -> str:
    if launch["log_max_mib"] is None:
        return ""
    return f", rotated at {format_size_mib(launch['log_max_mib'])}, {launch['log_keep']} kept"


def _exit(job: dict[str, Any]) -> str:
    if job["signal"]:
        return f"signal {job['signal']}"
    return "-" if job["exit_code"] is None else f"code {job['exit_code']}"


def energy_text(run: dict[str, Any]) -> str:
    """Energy of a run's cards, what it cost and emitted, as far as known: `1.90 kWh, 0.53 EUR, 0.72 kg CO2`."""
    kwh, measured = run["energy_j"] / 3.6e6, run["measured"] or {}
    parts = [f"{kwh:.2f} kWh" if kwh >= 0.1 else f"{kwh * 1000:.1f} Wh"]
    if measured.get("cost") is not None:
        parts.append(f"{measured['cost']:.2f} {measured['currency']}".rstrip())
    if measured.get("grams") is not None:
        grams = measured["grams"]
        parts.append(f"{grams / 1000:.2f} kg CO2" if grams >= 100 else f"{grams:.1f} g CO2")
    if len(parts) > 1 and measured["pue"] != 1:
        parts[-1] += f" with PUE {measured['pue']:g}"
    return ", ".join(parts)


def _describe_run(run: dict[str, Any]) -> list[str]:
    head = f"Run {run['run']}: {run['outcome'] or run['state']} on {run['node']}"
    if run.get("native_id"):
        head += f", Slurm's job {run['native_id']}"
    if run["node"] in {gpu["node"] for gpu in run["gpus"]}:
        head += f", GPU {gpu_list(gpu['index'] for gpu in run['gpus'])}"
    elif run["gpus"]:
        head += f", GPUs {places(run['gpus'])}"
    if run["reason_text"]:
        head += f": {run['reason_text']}"
    times = f"{instant(run['start_at'])} to {instant(run['end_at'])}"
    if run["start_at"] and run["end_at"]:
        times += f" ({format_duration(run['end_at'] - run['start_at'])})"
    facts = [
        f"CPU time {run['cpu_s']:.1f} s" if run["cpu_s"] is not None else "",
        f"peak memory {format_size_mib(run['peak_mem_mib'])}" if run["peak_mem_mib"] is not None else "",
        f"peak VRAM {format_size_mib(run['peak_vram_mib'])}" if run["peak_vram_mib"] is not None else "",
        f"GPU use {run['mean_utilisation']:.0%}" if run["mean_utilisation"] is not None else "",
        f"GPUs idle since {instant(run['idle_at'])}" if run["idle_at"] is not None and not run["end_at"] else "",
        f"energy {energy_text(run)}" if run["energy_j"] is not None else "",
        f"power limit {run['power_cap_w']:g} W" if run.get("power_cap_w") is not None else "",
    ]
    lines = [printable(head), f"  {times}"]
    if run.get("is_filler"):
        lines.append("  filler: the budget was spent; costs nothing, and any job within its budget may preempt it")
    known = ", ".join(fact for fact in facts if fact)
    if known:
        lines.append(f"  {known}")
    if run.get("series"):
        from gpusched.cli.sparklines import run_lines

        lines += run_lines(run["series"])
    files = run.get("files", [])
    if len(files) > 1:
        lines += [f"  output {printable(one['path'])} ({_writers(one)})" for one in files[:_MOST_FILES]]
        if len(files) > _MOST_FILES:
            lines.append(f"  and {len(files) - _MOST_FILES} more output files")
    elif run["stdout_path"] is not None:  # masked in other users' jobs
        lines.append(f"  output {printable(run['stdout_path'])}")
    if run.get("tracker_url"):
        lines.append(f"  tracked at {run['tracker_url']}")
    return lines


_TRACKED = (b"View run", b"Experiment is live on", b"ClearML results page", b"neptune.ai/", b"View project at")
"""What experiment trackers write before the address of a run; the last is the least exact."""
_ADDRESS_SIGNS = frozenset(b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-._~:/?#[]@!$&*+,;=%")
_SEARCHED_BYTES = 1 << 16


def tracker_url(run: dict[str, Any]) -> str | None:
    """Address of the run in an experiment tracker, from the first or last 64 KiB of its output, where that is readable.

    Read by the viewer, with the viewer's own rights.
    """
    path, start_at = run.get("stdout_path"), run["start_at"]
    if path is None or start_at is None:
        return None
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (OSError, ValueError):
        return None
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_mtime < start_at:
            # An earlier file of this name, while the run writes on another machine.
            return None
        places = {0, max(0, status.st_size - _SEARCHED_BYTES)}
        text = b"\n".join(os.pread(fd, _SEARCHED_BYTES, place) for place in sorted(places))
    except OSError:
        return None
    finally:
        os.close(fd)
    for words in _TRACKED:
        for line in reversed(text.splitlines()):
            if words in line and (found := _address(line)) is not None:
                return found
    return None


def _address(line: bytes) -> str | None:
    """The last http address of a line, with the characters that may be in one."""
    at = max(line.rfind(b"https://"), line.rfind(b"http://"))
    if at < 0:
        return None
    end = next((end for end in range(at, len(line)) if line[end] not in _ADDRESS_SIGNS), len(line))
    return line[at:end].rstrip(b".,:;").decode() if len(line[at:end]) > len("https://") else None


def _writers(file: dict[str, Any]) -> str:
    """Who writes to one of several files: `rank 5 on lab2`."""
    ranks = file["ranks"]
    if len(ranks) == 1:
        return f"rank {ranks[0]} on {file['node']}"
    return f"ranks {ranks[0]} to {ranks[-1]} on {file['node']}" if ranks else f"on {file['node']}"


def snapshot_about(job: dict[str, Any]) -> dict[str, Any] | None:
    """The known facts about a job's snapshot, and its folder; None if it was removed or belongs to another user."""
    from gpusched.snapshots.snapshot import about, folder_in  # rarely needed

    folder = folder_in(job["work_dir"], job["snapshot"])
    try:
        return None if folder is None else {**about(folder), "folder": folder}
    except OSError:
        return None


def snapshot_line(known: dict[str, Any] | None, name: str) -> str:
    """Commit, whether dirty, number of files, folder."""
    if known is None:
        return f"{name}, deleted or another user's"
    from gpusched.snapshots.snapshot import show_size

    commit = f"commit {known['commit'][:12]}" if known["commit"] else "no commit"
    state = {None: "plain copy", True: f"{commit} with changes", False: commit}[known["is_dirty"]]
    size = show_size(known["bytes"])
    return f"{state}, {known['files']} files, {size}, in {known['folder']}"


def attended(job: dict[str, Any]) -> list[tuple[str, str]]:
    """Facts about the foreground of a job, as labelled lines."""
    facts = job["foreground"]
    how = f"{'at a terminal' if facts['terminal'] else 'with pipes'}, {_who(job, facts)}"
    if facts["keep"] and facts["client"] is not None:
        how += "; keeps running after that disconnects"
    pairs = [("Foreground", how)]
    if facts["lease_s"] is not None:
        lease = format_duration(facts["lease_s"])
        if facts["lease_ends_at"] is not None:
            lease += f", expires {instant(facts['lease_ends_at'])} unless there is activity"
        pairs.append(("Lease", lease))
    return pairs


def _who(job: dict[str, Any], facts: dict[str, Any]) -> str:
    client = facts["client"]
    if client is not None:
        verb = "waiting" if job["state"] == "PENDING" else "attached"
        return f"process {client['pid']} has been {verb} since {instant(client['since_at'])}"
    if not facts["is_known"]:
        return "unknown client: its supervisor does not answer"
    if facts["keep"] and job["state"] in ("PENDING", "RUNNING", "SUSPENDED"):
        return f"not attached; come back with: grun --attach {job['id']}"
    return "not attached"
