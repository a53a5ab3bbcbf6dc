"""How long pages of `gpusched web` take with 10,000 pending jobs, beside what the daemon and an empty page need."""

from __future__ import annotations

import http.client
import re
import subprocess
import sys
import time
from collections.abc import Callable
from statistics import median

from benchmarks.harness import Bench, cpu_s, percentile, scheduler

_JOBS = 10_000
_TIMES = 20
FIRST_PAGE_S = 0.3
"""What a first look at the queue may take."""
# As `gpusched web` does, but also for root, under whom benchmarks may run.
SERVE = """
import asyncio, sys
from gpusched.addons.web.server import WebAddress, run
asyncio.run(run(WebAddress(port=0), (), sys.argv[1]))
"""


def main(times: int = _TIMES) -> None:
    """Print the first and the median time of each page, and those of the floors."""
    with scheduler("[node]\ncpus = 1\n", fake_gpus="8xA100:80GiB") as bench:
        spec = {"argv": ["sleep", "1000"], "work_dir": bench.home, "env": {}, "gpus": 1, "time_limit_s": 3600}
        lines = [f"sleep {number + 1000}" for number in range(_JOBS)]
        bench.client.call("POST", "/v1/jobs", {"spec": spec, "batch": lines})
        time.sleep(5.0)
        server = subprocess.Popen(
            [sys.executable, "-c", SERVE, bench.client.socket_path], stdout=subprocess.PIPE, text=True
        )
        try:
            assert server.stdout is not None
            port = int(server.stdout.readline().partition(" serves ")[0].rpartition(":")[2])
            _measure(bench, port, times, (bench.daemon_pid(), server.pid))
        finally:
            server.terminate()
            server.wait(10)


def _measure(bench: Bench, port: int, times: int, pids: tuple[int, int]) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    host = {"Host": f"127.0.0.1:{port}"}

    def page(path: str, cookie: str = "") -> Callable[[], int]:
        def look() -> int:
            connection.request("GET", path, headers={**host, "Cookie": cookie} if cookie else host)
            answer = connection.getresponse()
            size = len(answer.read())
            assert answer.status == 200, (path, answer.status)
            return size

        return look

    cookie = sign_in(bench, connection, port)
    first_s = _print("/queue", page("/queue", cookie), times, pids)
    for path in ("/", "/queue?page=40", "/timeline", "/cards", "/jobs/9000", "/people"):
        _print(path, page(path, cookie), times, pids)
    _print("floor: an empty page (/login)", page("/login"), times, pids)
    _print("floor: /v1/board on the socket", lambda: len(bench.client.raw("/v1/board?limit=200")), times, pids)
    pending = [f"/jobs/{number}" for number in range(5000 - times, 5000)]

    def another() -> int:
        # With a change before each look, the forecast is a new one each time.
        bench.client.call("POST", "/v1/jobs/hold", {"ids": [_JOBS]})
        bench.client.call("POST", "/v1/jobs/release", {"ids": [_JOBS]})
        return page(pending.pop(), cookie)()

    _print("/jobs/4999, changed meanwhile", another, times, pids)
    print(f"the first page took {first_s * 1e3:.0f} ms; at most {FIRST_PAGE_S * 1e3:.0f} ms are wanted")


def sign_in(bench: Bench, connection: http.client.HTTPConnection, port: int) -> str:
    origin = {"Origin": f"http://127.0.0.1:{port}", "Content-Type": "application/x-www-form-urlencoded"}
    connection.request("GET", "/login")
    form = connection.getresponse()
    mark, text = (form.getheader("Set-Cookie") or "").partition(";")[0], form.read().decode()
    found = re.search(r'name="csrf" value="([0-9a-f]+)"', text)
    assert found is not None
    code = bench.client.call("POST", "/v1/web/code", {})["code"]
    connection.request("POST", "/login", f"csrf={found[1]}&code={code}&next=/", {**origin, "Cookie": mark})
    answer = connection.getresponse()
    answer.read()
    cookies = [line.partition(";")[0] for line in answer.headers.get_all("Set-Cookie", [])]
    return next(cookie for cookie in cookies if cookie.startswith("gpusched_session_"))


def _print(name: str, look: Callable[[], int], times: int, pids: tuple[int, int]) -> float:
    """One line: times, the processor time of daemon and web page for each look, and the size."""
    took, size = [], 0
    before_s = [cpu_s(pid) for pid in pids]
    for _ in range(times):
        began = time.perf_counter()
        size = look()
        took.append(time.perf_counter() - began)
    daemon_ms, web_ms = ((cpu_s(pid) - before) / times * 1e3 for pid, before in zip(pids, before_s, strict=True))
    print(
        f"{name:<32} first {took[0] * 1e3:6.1f} ms   median {median(took) * 1e3:6.1f} ms   p95"
        f" {percentile(took, 0.95) * 1e3:6.1f} ms   processor {daemon_ms:5.1f} + {web_ms:5.1f} ms   {size:9,} bytes"
    )
    return took[0]
