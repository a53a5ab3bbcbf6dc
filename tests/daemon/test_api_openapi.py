"""The OpenAPI document against the routes of the running server, and its answers against itself."""

from __future__ import annotations

import json
import re
import socket
from types import SimpleNamespace

import jsonschema
from harness import Daemon

from gpusched.api.openapi import build
from gpusched.api.routes import ROUTES
from gpusched.api.server import build_app


def test_the_document_lists_exactly_the_server_routes() -> None:
    signals = SimpleNamespace(jobs_changed=SimpleNamespace(connect=lambda listener: None))
    scheduler = SimpleNamespace(signals=signals)
    service = SimpleNamespace(daemon=SimpleNamespace(serves_all=False), scheduler=scheduler, announce=None, pace=None)
    app = build_app(service)  # type: ignore[arg-type]
    served = {
        (route.method, route.resource.canonical)
        for route in app.router.routes()
        if route.resource is not None and route.method != "HEAD"
    }
    described = {(method.upper(), path) for path, operations in build(ROUTES)["paths"].items() for method in operations}
    assert served == described


def test_the_server_serves_its_description(daemon: Daemon) -> None:
    assert daemon.call("GET", "/v1/openapi.json") == build(ROUTES)


def test_answers_match_the_document(daemon: Daemon) -> None:
    job_id = daemon.submit("/bin/true")
    daemon.wait(job_id)
    step = {"step": "a", "spec": {"argv": ["/bin/true"], "work_dir": str(daemon.home)}}
    pipeline = daemon.call("POST", "/v1/pipelines", {"name": "p", "steps": [step]})["pipeline"]
    document = build(ROUTES)
    job_schema = document["components"]["schemas"]["Job"]
    for path, operations in document["paths"].items():
        operation = operations.get("get")
        if operation is None or path == "/v1/openapi.json":
            continue
        if "text/plain" in operation["responses"]["200"]["content"]:
            assert daemon.client.text(path).startswith("# HELP")
            continue
        if "application/octet-stream" in operation["responses"]["200"]["content"]:
            # Of other nodes only: see test_reach_other_nodes.
            continue
        if path in ("/v1/web/session", "/v1/web/token"):
            # Of browsers that are signed in, and of programs: see test_web_sign_in and test_web_api.
            continue
        query = f"?ids={job_id}" if path in ("/v1/wait", "/v1/logs") else "?states=all" if path == "/v1/jobs" else ""
        answer = daemon.call("GET", path.replace("{id}", pipeline if "pipelines" in path else job_id) + query)
        assert answer["schema_version"] == 1
        promised = re.findall(r"[a-z_]+", operation["responses"]["200"]["description"].removeprefix("carries "))
        assert any(word in answer for word in promised), (path, sorted(answer))
        for job in answer.get("jobs", []) if path == "/v1/jobs" else []:
            jsonschema.validate(job, job_schema)


def test_errors_have_one_format(daemon: Daemon) -> None:
    schema = build(ROUTES)["components"]["responses"]["Error"]["content"]["application/json"]["schema"]
    for method, path, status, code in (
        ("GET", "/v1/nowhere", 404, "not_found"),
        ("DELETE", "/v1/jobs", 400, "usage"),
        ("GET", "/v1/jobs/999", 404, "not_found"),
        ("GET", "/v1/jobs/abc", 400, "usage"),
        ("GET", "/v1/jobs?states=sleeping", 400, "usage"),
        ("GET", "/v1/jobs?fields=colour", 400, "usage"),
        ("POST", "/v1/jobs/cancel", 400, "usage"),
    ):
        found, document = raw(daemon, method, path, b"{}" if method == "POST" else b"")
        assert found == status, (path, document)
        jsonschema.validate(document, schema)
        assert document["error"]["code"] == code
        assert document["error"]["message"]
        assert document["error"]["hint"]


def test_invalid_json_is_a_usage_error(daemon: Daemon) -> None:
    for body in (b"{", b"[]", b"\xff\xfe", b'{"spec": ' + b"[" * 100_000):
        status, document = raw(daemon, "POST", "/v1/jobs", body)
        assert (status, document["error"]["code"]) == (400, "usage")


def raw(daemon: Daemon, method: str, path: str, body: bytes) -> tuple[int, dict[str, dict[str, str]]]:
    """One request by hand, below the client's error handling."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(str(daemon.home / "run" / "api.sock"))
        head = f"{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
        sock.sendall(head.encode() + body)
        answer = b""
        while chunk := sock.recv(65536):
            answer += chunk
    top, _, content = answer.partition(b"\r\n\r\n")
    return int(top.split()[1]), json.loads(content)
