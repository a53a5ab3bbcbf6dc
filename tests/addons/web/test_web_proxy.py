"""Users named by a reverse proxy on the web page's Unix socket, without a daemon."""

from __future__ import annotations

import asyncio
import os
import pwd
import socket
from typing import Any

import pytest
from aiohttp.test_utils import make_mocked_request

from gpusched.addons.web import sign_in
from gpusched.addons.web.link import DaemonLink
from gpusched.addons.web.server import WebAddress, read_address
from gpusched.addons.web.sign_in import SignIn, WrongHost, local_path
from gpusched.errors import Forbidden, SignedOut, UsageError

PUBLIC = "https://gpu.lab.org"


class Link(DaemonLink):
    """A daemon that begins sessions."""

    def __init__(self) -> None:
        super().__init__("/nowhere")
        self.asked: list[Any] = []

    async def ask(self, method: str, path: str, token: str | None = None, body: Any = None) -> dict[str, Any]:
        self.asked.append((method, path, body))
        return {"token": f"token of {body['user']}"}


class Transport:
    """The proxy's end of a Unix socket, as the kernel describes it."""

    def __init__(self, sock: socket.socket | None) -> None:
        self._sock = sock

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._sock if name == "socket" else default


def token_of(headers: list[tuple[str, str]], *, proxies: tuple[str, ...], is_unix: bool = True) -> tuple[str, Link]:
    link = Link()
    site = SignIn(link, PUBLIC, user_header="X-Remote-User", proxy_users=proxies)
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    try:
        request = make_mocked_request(
            "GET", "/", [("Host", "gpu.lab.org"), *headers], transport=Transport(ours if is_unix else None)
        )
        return asyncio.run(site.token_of(request)), link
    finally:
        ours.close()
        theirs.close()


@pytest.fixture
def proxy(monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of the account that the test's own socket seems to belong to."""
    user = pwd.getpwnam("daemon")
    packed = sign_in._UCRED.pack(os.getpid(), user.pw_uid, user.pw_gid)
    monkeypatch.setattr(sign_in, "_peer_credentials", lambda sock: packed)
    return user.pw_name


def test_a_trusted_proxy_names_the_user(proxy: str) -> None:
    token, link = token_of([("X-Remote-User", "ann")], proxies=(proxy,))
    assert token == "token of ann"
    assert link.asked == [("POST", "/v1/web/sessions", {"user": "ann", "allow": []})]


@pytest.mark.parametrize(("proxies", "is_unix"), [((), True), (("bin",), True), (("daemon",), False)])
def test_nobody_else_names_a_user(proxy: str, proxies: tuple[str, ...], is_unix: bool) -> None:
    with pytest.raises(Forbidden, match="only a proxy"):
        token_of([("X-Remote-User", "ann")], proxies=proxies, is_unix=is_unix)


@pytest.mark.parametrize("values", [("ann", "bob"), ("ann", "ann"), ("ann,bob",)])
def test_two_names_are_refused(proxy: str, values: tuple[str, ...]) -> None:
    with pytest.raises(UsageError, match="names several users"):
        token_of([("X-Remote-User", value) for value in values], proxies=(proxy,))


def test_a_request_without_the_header_needs_a_code(proxy: str) -> None:
    with pytest.raises(SignedOut):
        token_of([], proxies=(proxy,))


@pytest.mark.parametrize("name", ["127.0.0.1:8760", "localhost", "gpu.lab.org.evil.example", "lab.org"])
def test_behind_a_proxy_only_its_name_counts(name: str) -> None:
    with pytest.raises(WrongHost):
        SignIn(Link(), PUBLIC).check_host(make_mocked_request("GET", "/", {"Host": name}))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (("0.0.0.0:8760", None, None), "0.0.0.0 is not this machine alone"),
        (("10.0.0.5:8760", None, None), "10.0.0.5 is not this machine alone"),
        (("lab1:8760", None, None), "'lab1:8760' is not an IP address and port"),
        (("127.0.0.1:99999", None, None), "'127.0.0.1:99999' is not an IP address and port"),
        (("127.0.0.1", None, None), "'127.0.0.1' is not an IP address and port"),
        (("127.0.0.1:1", "/x", PUBLIC), "--socket excludes --listen"),
        ((None, "/x", None), "--socket needs --public"),
        ((None, None, PUBLIC), "--public is for a proxy"),
        ((None, "/x", "gpu.lab.org"), "'gpu.lab.org' is not an address of a site"),
        ((None, "/x", "https://gpu.lab.org/path"), "'https://gpu.lab.org/path' is not an address of a site"),
    ],
)
def test_wrong_addresses_are_one_sentence(options: tuple[str | None, str | None, str | None], text: str) -> None:
    with pytest.raises(UsageError) as caught:
        read_address(*options)
    assert caught.value.message.startswith(text)
    assert caught.value.hint


def test_addresses_that_are_right() -> None:
    assert read_address(None, None, None) == WebAddress("127.0.0.1", 8760)
    assert read_address("[::1]:0", None, None).shown == "http://[::1]:0"
    assert read_address(None, "/run/web.sock", PUBLIC + "/") == WebAddress(socket_path="/run/web.sock", public=PUBLIC)


@pytest.mark.parametrize("text", [None, "", "//x", "/\\x", "https://x", "/a\nb", "a", "/" + "x" * 600, "/é"])
def test_only_paths_of_the_page_are_gone_to(text: str | None) -> None:
    assert local_path(text) == "/"


@pytest.mark.parametrize("text", ["/", "/queue?q=user:me", "/jobs/8_2?run=1"])
def test_paths_of_the_page_are_kept(text: str) -> None:
    assert local_path(text) == text
