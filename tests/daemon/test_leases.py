"""Jobs with --lost-after on a node that does not answer: ended there, requeued elsewhere, and never twice at a time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from clusters import Cluster, sh
from support import is_alive, wait_until

LEASE_S = 5


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    made = Cluster(tmp_path_factory.mktemp("leases"))
    yield made
    for node in ("n2", "n3"):
        made.heal(node)
    made.head.close()


def leave_marks(folder: Path) -> tuple[str, ...]:
    """A job that dates its beginning and every moment of its life, by its run and the clock of this machine."""
    text = (
        f"trap 'echo $GPUSCHED_RUN told >> {folder}/marks; exit 9' TERM; echo $GPUSCHED_RUN begins >> {folder}/marks; "
        f"[ $GPUSCHED_RUN = $GPUSCHED_JOB_ID.1 ] || exit 4; while :; do sleep 0.05; done"
    )
    return sh(text)


def test_a_cut_off_job_ends_on_its_node_and_starts_again_elsewhere(cluster: Cluster, tmp_path: Path) -> None:
    head = cluster.head
    job = head.submit(*leave_marks(tmp_path), gpus=1, nodelist=["n2", "n3"], lost_after_s=LEASE_S)
    head.pid_of(job)
    first = head.job(job)["node"]
    waits = cluster.on(first, "sleep", "600", gpus=1)
    pid, other = head.pid_of(job), head.pid_of(waits)
    cluster.cut(first)
    shown = head.job(job)
    assert shown["reason"] == "NodeUnreachable"
    assert "unless the node answers, the job's lease ends it there, and it counts as lost at " in shown["reason_text"]
    notes = cluster.nodes()[first]["notes"]
    assert any(f"unless it answers, job {job} will have ended there by lease" in note for note in notes), notes
    (ended,) = head.wait(job)
    assert not is_alive(pid), "the head may start it elsewhere only when it has ended"
    assert [run["node"] for run in ended["runs"]] == [first, {"n2": "n3", "n3": "n2"}[first]]
    assert (ended["exit_code"], ended["runs"][0]["outcome"], ended["runs"][0]["reason"]) == (4, "NODE_FAIL", "NodeDown")
    marks = (tmp_path / "marks").read_text().splitlines()
    assert marks == [f"{job}.1 begins", f"{job}.1 told", f"{job}.2 begins"]
    assert (head.state(waits), is_alive(other)) == ("RUNNING", True), "without a lease it waits for its node"
    cluster.heal(first)
    wait_until(lambda: head.state(waits) == "RUNNING" and head.job(waits)["reason"] is None, what="its node again")
    assert len(head.job(waits)["runs"]) == 1
    head.call("POST", "/v1/jobs/cancel", {"ids": [waits]})
    head.wait(waits)


@pytest.mark.nightly
def test_a_restarted_head_counts_a_gangs_lease_anew_and_ends_all_of_it(cluster: Cluster, tmp_path: Path) -> None:
    head = cluster.head
    text = f"echo $$ > {tmp_path}/pid.$NODE_RANK; exec sleep 600"
    job = head.submit(*sh(text), nodes=2, gpus=2, nodelist=["n2", "n3"], lost_after_s=LEASE_S)
    head.pid_of(job)
    pids = [tmp_path / f"pid.{rank}" for rank in range(2)]
    wait_until(lambda: all(path.exists() and path.read_text() for path in pids), what="both ranks")
    alive = [int(path.read_text()) for path in pids]
    cluster.cut("n3")
    # The agent of a head that was killed is gone, too; its runs are not.
    head.kill()
    head.start()
    assert head.job(job)["reason"] == "NodeUnreachable"
    wait_until(lambda: head.job(job)["runs"][0]["outcome"] == "NODE_FAIL", what="the decision")
    assert not any(map(is_alive, alive))
    assert head.job(job)["runs"][0]["reason"] == "NodeDown"
    cluster.heal("n3")
    # It needs both nodes, and starts again when their GPUs are clean.
    wait_until(lambda: (head.state(job), len(head.job(job)["runs"])) == ("RUNNING", 2), what="the next run")
    head.call("POST", "/v1/jobs/cancel", {"ids": [job]})
    head.wait(job)
