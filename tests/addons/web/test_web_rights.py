"""What each kind of user sees of another's job in the web page, with and without private data."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from people import ANN, BOB, EVE, NEEDS_ROOT, Person, SystemDaemon
from support import wait_until
from web_host import Visitor, WebHost

pytestmark = NEEDS_ROOT

OPERATOR, ADMIN, ADMIN_GROUP = "www-data", "backup", "backup"
SECRET = "secret-name"
# The web process of the test is the test, which runs as root.
CONFIG = f"""
[web]
user = "root"
[access]
admin_group = "{ADMIN_GROUP}"
private_data = {{private}}
[queue.lab]
operators = ["{OPERATOR}"]
[default]
queue = "lab"
"""


class Site:
    """A daemon with its page, and a job of somebody with output."""

    def __init__(self, private: str) -> None:
        self.daemon = SystemDaemon(CONFIG.format(private=private))
        self.daemon.start()
        self.host = WebHost(str(self.daemon.socket))
        self.people: dict[str, Person] = {user: self.daemon.person(user) for user in (ANN, BOB, EVE, OPERATOR, ADMIN)}
        folder = self.daemon.home / "out"
        folder.mkdir()
        folder.chmod(0o777)
        self.job = self.people[ANN].submit("/bin/sh", "-c", "echo secret-output; sleep 1000", name=SECRET, gpus=1,
                                           stdout=f"{folder}/out.txt")  # fmt: skip
        output = folder / "out.txt"
        wait_until(lambda: output.exists() and output.read_text(), what="its output")

    def visitor(self, user: str) -> Visitor:
        found = Visitor(self.host)
        assert found.sign_in(self.people[user]).status == 303
        return found

    def close(self) -> None:
        self.host.close()
        self.daemon.close()


@pytest.fixture(scope="module", params=["[]", '["names"]', '["jobs", "usage"]'], ids=["open", "names", "private"])
def site(request: pytest.FixtureRequest) -> Iterator[Site]:
    found = Site(request.param)
    yield found
    found.close()


@pytest.mark.parametrize("user", [ANN, EVE, OPERATOR, ADMIN])
def test_pages_show_each_user_what_the_commands_would(site: Site, user: str, request: pytest.FixtureRequest) -> None:
    is_private = "private" in request.node.callspec.id
    visitor = site.visitor(user)
    whole = user != EVE
    is_named = whole or "open" in request.node.callspec.id
    page = visitor.get(f"/jobs/{site.job}")
    assert page.status == (404 if is_private and not whole else 200)
    assert (SECRET in page.text) is is_named
    # Reading output as its owner takes more than seeing the job.
    assert ("secret-output\n</pre>" in page.text) is (user == ANN)
    log = visitor.get(f"/jobs/{site.job}/log")
    assert ("secret-output" in log.text, log.status == 200) == (user == ANN, user == ANN)
    assert whole or not is_private or log.status == 404
    for path in ("/", "/queue", "/cards", "/timeline", "/people"):
        answer = visitor.get(path)
        assert answer.status == 200, (path, answer.text)
        if not whole:
            assert is_named or SECRET not in answer.text, path
            assert "secret-output" not in answer.text, path
            assert not is_private or f"/jobs/{site.job}" not in answer.text, path
            assert not is_private or f"{ANN}</" not in answer.text, path
    overview = visitor.get("/").text
    assert ("others: 1" in overview) is (is_private and not whole)
    assert "Cancel" not in page.text


def test_people_who_sign_in_one_after_the_other_see_their_own(site: Site) -> None:
    visitor = Visitor(site.host)
    for user in (ANN, BOB):
        visitor.sign_in(site.people[user])
        assert f"<span>{user}</span>" in visitor.get("/").text


def test_root_gets_no_code_and_the_web_process_reads_nothing_without_a_session(site: Site) -> None:
    error = Person("root", str(site.daemon.socket))
    try:
        assert error.refusal("POST", "/v1/web/code", {}).code == "forbidden"
    finally:
        error.leave()
