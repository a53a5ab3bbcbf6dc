"""Makes requests that no client of ours would make, from a seed: the same seed makes the same requests.

Three kinds: bodies and queries by the schema of the OpenAPI document with some of it turned into something else;
random methods on random paths; and bytes that are hardly HTTP at all.
"""

from __future__ import annotations

import json
import math
import socket
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any
from urllib.parse import quote

from gpusched.api.openapi import build
from gpusched.api.routes import ROUTES

TIMEOUT_S = 30.0
"""An answer takes milliseconds; a request that waits says so in its query and is given a short time."""
SHORT_S = 0.05
"""For bytes after which the daemon may rightly wait for more."""

WEIRD_TEXTS = (
    *("", " ", "\n", "\t", "\0", "-", "--", ".", "..", "/", "../../etc/passwd", "/etc/passwd", "/proc/self/mem"),
    *("%j", "%%", "%", "%99999999999999999999j", "%x/%u", "{x}", "{0.__class__}", "${HOME}", "$(id)", "`id`", "a=b"),
    *("\x1b[2J\x1b]0;x\x07", "\u202e", "\ud800", "\udcff", "é", "٣", "0x10", "1e999", "NaN", "-1", "@", "p1", "1_1"),
    *("1_[0-9]", "1_[0-999999999]", "0-9%0", "%4", "0-1000000", "9" * 400, "A" * 300, "a,b,,c", ",", "all", "RUNNING"),
    *("afterok:1", "afterok:1:2?afterany:3", "afterok:", "singleton", "afterok:1+5", "after:99999999999999999999"),
    *("n[1-99999999]", "n[1-3", "a&b|!c", "((((", "*", "x" * 70_000, "'; DROP TABLE jobs; --", "gpu:", "root"),
)
WEIRD_NUMBERS = (
    *(0, 1, -1, 2, 7, 64, 65, 2**31, 2**32, 2**53, 2**63 - 1, 2**63, 2**64, -(2**63) - 1, 10**40, 10**400),
    *(0.5, -0.0, 1e-320, 1e308, math.inf, -math.inf, math.nan, 0.1, 4e9, 1e18),
)
WEIRD_JSON = (
    *(
        "",
        "null",
        "[]",
        "{}",
        "1",
        '"x"',
        "{",
        "[",
        "{]",
        "nul",
        '{"a":1,}',
        "{'a': 1}",
        "[" * 100_000,
        '{"a":' * 5_000,
    ),
    *('{"spec":1,"spec":{}}', '{"ids":[1],"ids":"x"}', "1" * 5_000, "-", '{"a":1e99999}', '"\\ud800"', '{"\\u0000":1}'),
    *('{"spec":{"argv":["/bin/true"],"argv":[]}}', "\ufeff{}", "NaN", "Infinity", '{"x":NaN}', "//", '{"ids":[1e400]}'),
)
METHODS = ("GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH", "TRACE", "CONNECT", "get", "X" * 30)
HEADERS = (
    *("Content-Type: text/html", "Content-Encoding: gzip", "Content-Encoding: deflate", "Content-Encoding: br"),
    *("Transfer-Encoding: chunked", "Transfer-Encoding: chunked, gzip", "Transfer-Encoding: x", "Content-Length: -1"),
    *("Content-Length: 5, 5", "Content-Length: 99999999999999999999", "Content-Length: 0x10", "Content-Length: +3"),
    *("Expect: 100-continue", "Expect: nonsense", "Connection: Upgrade\r\nUpgrade: websocket", "Connection: close"),
    *("X-Forwarded-User: root", "Authorization: Basic cm9vdDo=", "X-User: root", "X-Remote-Uid: 0", "User: root"),
    *("Host: a\r\nHost: b", "Cookie: uid=0", "Range: bytes=0-1", "X: " + "a" * 9_000, "X: \x00", ": x", "X : y"),
    *(" folded: x", "X\n: y", "If-None-Match: *", "Accept-Encoding: gzip", "Content-Type: multipart/form-data"),
)
QUERY_TEXTS = ("0", "1", "0.01", "-1", "nan", "inf", "1e309", "1,2,3", "1,,2", "%00", "%ff", "%zz", "+", "&", "=")


@dataclass
class Tally:
    """What came of it."""

    asked: int = 0
    statuses: Counter[int] = field(default_factory=Counter)
    """By status; 0 for a connection that was closed without an answer, or bytes that were not answered in time."""
    faults: list[str] = field(default_factory=list)
    """Requests that were answered with an error of the daemon's own, or not at all."""


class Fuzzer:
    """Sends requests over one socket as whoever runs it."""

    def __init__(self, path: str, seed: int) -> None:
        self._path = path
        self._random = Random(seed)
        self._document = build(ROUTES)
        self._operations = [
            (method.upper(), where, operation)
            for where, operations in self._document["paths"].items()
            for method, operation in operations.items()
        ]
        self._socket: socket.socket | None = None
        self.tally = Tally()

    def run(self, requests: int) -> Tally:
        """Send so many."""
        for _ in range(requests):
            kind = self._random.random()
            if kind < 0.75:
                self._ask(*self._by_the_schema())
            elif kind < 0.88:
                self._ask(*self._by_chance())
            else:
                self._send_bytes()
            self.tally.asked += 1
        self._hang_up()
        return self.tally

    def run_of(self, requests: int) -> Callable[[], Tally]:
        """The same, for whoever does it elsewhere."""
        return lambda: self.run(requests)

    # --- what is asked ----------------------------------------------------------------------------

    def _by_the_schema(self) -> tuple[str, str, str | None, list[str]]:
        pick = self._random
        method, where, operation = pick.choice(self._operations)
        # Whoever fuzzes may not stop it, but a daemon that obeyed would end the run at once.
        path = where.replace("{id}", quote(self._id(), safe="") if pick.random() < 0.9 else self._text())
        pairs = []
        for parameter in operation.get("parameters", ()):
            name = parameter["name"]
            if parameter["in"] != "query" or (pick.random() < 0.5 and name != "timeout_s"):
                continue
            if name == "timeout_s":
                value = pick.choice(("0", "0.01", "-1", "nan", "inf", "x", ""))
            else:
                value = pick.choice((self._id(), self._text(), pick.choice(QUERY_TEXTS), "1"))
            pairs.append(f"{name}={quote(value, safe='', errors='surrogatepass')}")
        if "timeout_s" in str(operation.get("parameters")) and not any(p.startswith("timeout_s") for p in pairs):
            pairs.append("timeout_s=0")
        body = None
        schema = operation.get("requestBody")
        if schema is not None or (method == "POST" and pick.random() < 0.9):
            shape = {} if schema is None else schema["content"]["application/json"]["schema"]
            value = self._value(shape, 0)
            body = pick.choice(WEIRD_JSON) if pick.random() < 0.05 else json.dumps(value)
        return method, path + ("?" + "&".join(pairs) if pairs else ""), body, self._headers(0.1)

    def _by_chance(self) -> tuple[str, str, str | None, list[str]]:
        pick = self._random
        words = ["v1", "jobs", "v2", "..", "openapi.json", "%2e%2e", self._id(), "reservations", "", "cancel"]
        path = "/" + "/".join(pick.choice(words) for _ in range(pick.randrange(1, 6)))
        if pick.random() < 0.3:
            path = quote(self._text(), safe="/", errors="surrogatepass")[:4000] or "*"
        body = pick.choice(WEIRD_JSON) if pick.random() < 0.5 else None
        return pick.choice(METHODS), path, body, self._headers(0.5)

    def _headers(self, chance: float) -> list[str]:
        return [self._random.choice(HEADERS)] if self._random.random() < chance else []

    def _id(self) -> str:
        pick = self._random
        return pick.choice(
            (str(pick.randrange(1, 200)), f"{pick.randrange(1, 99)}_{pick.randrange(9)}", "p1", "@", "0")
        )

    def _text(self) -> str:
        pick = self._random
        if pick.random() < 0.8:
            return pick.choice(WEIRD_TEXTS)
        return "".join(chr(pick.randrange(1, 0x2FF)) for _ in range(pick.randrange(40)))

    def _anything(self, depth: int) -> Any:
        pick = self._random
        kind = pick.randrange(8 if depth < 4 else 5)
        if kind == 0:
            return pick.choice((None, True, False))
        if kind in (1, 2):
            return pick.choice(WEIRD_NUMBERS)
        if kind in (3, 4):
            return self._text()
        if kind in (5, 6):
            return [self._anything(depth + 1) for _ in range(pick.randrange(4))]
        return {self._text(): self._anything(depth + 1) for _ in range(pick.randrange(4))}

    def _value(self, shape: dict[str, Any], depth: int, name: str = "") -> Any:
        """A value by a schema, unless it is to be something else."""
        pick = self._random
        if "$ref" in shape:
            shape = self._document["components"]["schemas"][shape["$ref"].rpartition("/")[2]]
        if pick.random() < (0.03 if depth < 2 else 0.08):
            return self._anything(depth)
        kinds = shape.get("type", "object")
        kind = pick.choice([one for one in kinds if one != "null"]) if isinstance(kinds, list) else kinds
        if "enum" in shape:
            return pick.choice(shape["enum"])
        if kind == "object":
            return self._object(shape, depth)
        if kind == "array":
            if name in ("argv", "batch"):
                # Whatever else is wrong with a job: what it runs does no harm.
                return pick.choice((["/bin/true"], ["/bin/true", self._text()], [], ["true"], ["/bin/true"] * 3))
            return [self._value(shape.get("items", {}), depth + 1) for _ in range(pick.randrange(4))]
        if kind in ("integer", "number"):
            low, high = shape.get("minimum", 0), shape.get("maximum", 1000)
            near = (low, high, low + 1, (low + high) // 2 if high < 1e9 else 60, low - 1, high + 1)
            return pick.choice(near) if pick.random() < 0.9 else pick.choice(WEIRD_NUMBERS)
        if kind == "boolean":
            return pick.random() < 0.5
        plain = {"script": "#!/bin/true\n", "work_dir": "/tmp", "submit_dir": "/tmp", "stdout": "/dev/null"}
        plain |= {"stderr": "/dev/null", "fallback": "true", "queue": "default", "array": "0-3%2"}
        if name in ("script", "fallback") or pick.random() < 0.5:
            return plain.get(name, pick.choice(("x", "train", "1")))
        return self._text()

    def _object(self, shape: dict[str, Any], depth: int) -> dict[str, Any]:
        pick = self._random
        properties = shape.get("properties", {})
        if not properties:
            inner = shape.get("additionalProperties")
            items = inner if isinstance(inner, dict) else {}
            return {self._text()[:99]: self._value(items, depth + 1) for _ in range(pick.randrange(3))}
        chance = 0.5 if len(properties) < 12 else pick.choice((0.03, 0.1, 0.4))
        found = {
            name: self._value(inner, depth + 1, name) for name, inner in properties.items() if pick.random() < chance
        }
        if "argv" in properties and pick.random() < 0.9:
            found = {"hold": True, "work_dir": "/tmp", "stdout": "/dev/null", **found}
            if "script" not in found:
                found.setdefault("argv", ["/bin/true"])
        if pick.random() < 0.03:
            found[self._text()] = self._anything(depth)
        return found

    # --- how it is asked --------------------------------------------------------------------------

    def _ask(self, method: str, path: str, body: str | None, headers: list[str]) -> None:
        content = (body or "").encode("utf-8", "surrogatepass")
        lines = [f"{method} {path} HTTP/1.1", "Host: localhost", *headers]
        if content or method == "POST":
            lines.append(f"Content-Length: {len(content)}")
        head = ("\r\n".join(lines) + "\r\n\r\n").encode("utf-8", "surrogatepass")
        # A header out of the ordinary may have the daemon wait for what never comes.
        self._exchange(head + content, TIMEOUT_S if not headers else SHORT_S, f"{method} {path[:300]} {body!r:.1500}")
        if headers:
            self._hang_up()

    def _send_bytes(self) -> None:
        pick = self._random
        whole = bytearray(b"POST /v1/jobs HTTP/1.1\r\nHost: x\r\nContent-Length: 13\r\n\r\n" + b'{"spec": {} }')
        kind = pick.randrange(7)
        if kind == 0:
            for _ in range(pick.randrange(1, 20)):
                whole[pick.randrange(len(whole))] = pick.randrange(256)
        elif kind == 1:
            del whole[pick.randrange(1, len(whole)) :]
        elif kind == 2:
            whole = bytearray(pick.randbytes(pick.randrange(1, 300)))
        elif kind == 3:
            size = pick.choice(("5", "ffffffffffffffff", "-1", "zz", "0", "1;x=" + "y" * 5_000, "7fffffff"))
            whole = bytearray(b"POST /v1/jobs HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
            whole += size.encode() + b"\r\n{}\r\n0\r\n\r\n"
        elif kind == 4:
            # Two lengths: what one reader takes for a body is a request of its own for another.
            whole = bytearray(
                b"POST /v1/jobs HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n"
            )
            whole += b"0\r\n\r\nPOST /v1/shutdown HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}"
        elif kind == 5:
            whole = bytearray(b"GET /v1/status HTTP/1.1\r\nHost: x\r\n\r\n" * pick.randrange(2, 30))
        else:
            heads = b"".join(b"X-%d: y\r\n" % number for number in range(pick.randrange(1, 3_000)))
            whole = bytearray(b"GET /v1/status HTTP/1.1\r\nHost: x\r\n" + heads + b"\r\n")
        self._hang_up()
        self._exchange(bytes(whole), SHORT_S, f"bytes {bytes(whole[:300])!r}")
        self._hang_up()

    def _exchange(self, data: bytes, timeout_s: float, what: str) -> None:
        if self._socket is None:
            self._socket = socket.socket(socket.AF_UNIX)
            self._socket.connect(self._path)
        sock = self._socket
        sock.settimeout(timeout_s)
        try:
            sock.sendall(data)
            status = self._read_answer(sock, is_head=data.startswith(b"HEAD "))
        except TimeoutError:
            if timeout_s == TIMEOUT_S:
                self.tally.faults.append(f"no answer within {timeout_s:g} s: {what}")
            status = 0
            self._hang_up()
        except OSError:
            status = 0
            self._hang_up()
        self.tally.statuses[status] += 1
        if status >= 500 and status not in (501, 503, 507):
            self.tally.faults.append(f"{status}: {what}")

    def _read_answer(self, sock: socket.socket, *, is_head: bool) -> int:
        buffer = b""
        while b"\r\n\r\n" not in buffer:
            data = sock.recv(1 << 16)
            if not data:
                self._hang_up()
                return int(buffer[9:12] or 0) if buffer.startswith(b"HTTP/") else 0
            buffer += data
        head, _, body = buffer.partition(b"\r\n\r\n")
        lines = [line.decode("latin-1").lower() for line in head.split(b"\r\n")]
        status = int(lines[0].split()[1])
        sizes = [int(line.partition(":")[2]) for line in lines if line.startswith("content-length:")]
        left = (sizes[0] if sizes and not is_head else 0) - len(body)
        while left > 0:
            data = sock.recv(1 << 16)
            if not data:
                break
            left -= len(data)
        if left != 0 or "connection: close" in lines or not sizes:
            self._hang_up()
        return status

    def _hang_up(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None
