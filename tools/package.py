"""`python -m tools.package FOLDER [--python PYTHON]`: the wheel and the Debian package of this checkout.

The package holds an environment in /opt/gpusched for the distribution's own Python, with all dependencies; building it
asks PyPI for them. Equal sources, dependencies and SOURCE_DATE_EPOCH (default: the date of the last commit) give equal
files. Nothing in it names a path of the machine that built it.
"""

from __future__ import annotations

import argparse
import base64
import csv
import gzip
import hashlib
import io
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from typer._completion_shared import get_completion_script

from gpusched import __version__
from gpusched.addons.system.man_pages import man_pages
from gpusched.addons.system.system_plan import COMMANDS
from gpusched.cli.help import completion_script
from gpusched.cli.options import TABLES

REPOSITORY = Path(__file__).resolve().parents[1]
SCRIPTS = Path(__file__).parent / "debian"
HOME = "opt/gpusched"
EXTRAS = "notify"
MAINTAINER = "gpusched developers <gpusched@localhost.localdomain>"
_COMPLETIONS = {
    "bash": "usr/share/bash-completion/completions/{}",
    "zsh": "usr/share/zsh/vendor-completions/_{}",
    "fish": "usr/share/fish/vendor_completions.d/{}.fish",
}


def build_wheel(folder: Path, epoch: int) -> Path:
    """The wheel, made by hatchling."""
    before = set(folder.glob("*.whl"))
    _run(*_pip(), "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(REPOSITORY), epoch=epoch)
    made = sorted(set(folder.glob("*.whl")) - before) or sorted(before, key=os.path.getmtime)
    return made[-1]


def build_package(
    wheel: Path, folder: Path, epoch: int, *, python: str, constraint: str | None, maintainer: str = MAINTAINER
) -> Path:
    """The Debian package. Args: python: the distribution's interpreter, which the environment is for."""
    with tempfile.TemporaryDirectory(prefix="gpusched-") as scratch:
        root = Path(scratch) / "root"
        home = root / HOME
        _run(python, "-m", "venv", "--without-pip", str(home), epoch=epoch)
        pins = ["--constraint", constraint] if constraint else []
        target = f"gpusched-lab[{EXTRAS}] @ {wheel.resolve().as_uri()}"
        into = [*_pip(), "--python", str(home / "bin" / "python"), "install", "--quiet", "--no-compile"]
        _run(*into, "--no-warn-script-location", *pins, target, epoch=epoch)
        version = _run(python, "-c", "import sys; print('%d.%d' % sys.version_info[:2])", epoch=epoch).strip()
        relocate(home, version)
        compiled = [python, "-m", "compileall", "-q", "-f", "--invalidation-mode", "unchecked-hash"]
        _run(*compiled, "-s", str(root), "-p", "/", str(home / "lib"), epoch=epoch)
        return pack(root, folder, epoch, version=version, maintainer=maintainer)


def relocate(home: Path, version: str) -> None:
    """Make an environment at `home` one at /opt/gpusched for /usr/bin/python3.

    Args: version: of that Python, such as 3.11.
    """
    for path in [*home.glob("bin/[aA]ctivate*"), *home.rglob("direct_url.json")]:
        path.unlink()
    # The manual pages of the wheel are in /usr/share/man here.
    for unused in ("include", "share/man"):
        shutil.rmtree(home / unused, ignore_errors=True)
    (home / "pyvenv.cfg").write_text(
        f"home = /usr/bin\ninclude-system-site-packages = false\nversion = {version}\n", encoding="utf-8"
    )
    for path in sorted((home / "bin").iterdir()):
        if path.name not in COMMANDS:
            path.unlink()  # interpreters, and commands of the libraries
        else:
            content = path.read_bytes()
            path.write_bytes(content.replace(os.fsencode(home), f"/{HOME}".encode()))
    (home / "bin" / "python").symlink_to("/usr/bin/python3")
    (home / "bin" / "python3").symlink_to("python")
    for record in home.rglob("*.dist-info/RECORD"):
        _rewrite_record(record)


def _rewrite_record(record: Path) -> None:
    """Leave out files that are gone, and give the hashes of those that changed."""
    rows = []
    for name, digest, _ in csv.reader(record.read_text(encoding="utf-8").splitlines()):
        path = record.parent.parent / name
        if not path.exists():
            continue
        if digest:
            content = path.read_bytes()
            digest = "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
            rows.append((name, digest, str(len(content))))
        else:
            rows.append((name, "", ""))
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(sorted(rows))
    record.write_text(text.getvalue(), encoding="utf-8")


def pack(root: Path, folder: Path, epoch: int, *, version: str, maintainer: str = MAINTAINER) -> Path:
    """Complete a tree that has the environment, and pack it. Args: version: of the Python it is for."""
    for name in COMMANDS:
        _link(root / "usr/bin" / name, f"/{HOME}/bin/{name}")
    for page, text in man_pages(float(epoch)).items():
        _write(root / "usr/share/man/man1" / f"{page}.gz", _gzip(text.encode()))
    for shell, place in _COMPLETIONS.items():
        for command, make in TABLES.items():
            _write(root / place.format(command), completion_script(make(), shell).encode())
        script = get_completion_script(prog_name="gpusched", complete_var="_GPUSCHED_COMPLETE", shell=shell)
        _write(root / place.format("gpusched"), script.encode() + b"\n")
    about = root / "usr/share/doc/gpusched"
    _write(about / "copyright", _copyright(epoch).encode())
    _write(about / "changelog.gz", _gzip((REPOSITORY / "docs/changelog.md").read_bytes()))
    _write(about / "changelog.Debian.gz", _gzip(_changelog(epoch, maintainer).encode()))
    _write(root / "usr/share/lintian/overrides/gpusched", (SCRIPTS / "lintian-overrides").read_bytes())
    refuse_paths(root, (str(root), str(REPOSITORY), str(Path.home())))

    architecture = _run("dpkg", "--print-architecture", epoch=epoch).strip()
    control = root / "DEBIAN"
    files = [path for path in _files(root) if not path.is_symlink()]
    size_kib = sum(-(-path.stat().st_size // 1024) for path in files)
    sums = "".join(
        f"{hashlib.md5(path.read_bytes(), usedforsecurity=False).hexdigest()}  {path.relative_to(root)}\n"
        for path in files
    )
    _write(control / "control", _control(version, architecture, size_kib, maintainer).encode())
    _write(control / "md5sums", sums.encode())
    for script in ("preinst", "postinst", "prerm", "postrm"):
        _write(control / script, (SCRIPTS / script).read_bytes(), 0o755)
    for path in [root, *root.rglob("*")]:
        if not path.is_symlink():
            is_run = path.is_dir() or path.stat().st_mode & 0o100
            path.chmod(0o755 if is_run else 0o644)
        os.utime(path, (epoch, epoch), follow_symlinks=False)
    target = folder / f"gpusched_{debian_version()}_{architecture}.deb"
    _run("dpkg-deb", "--root-owner-group", "-Zxz", "--build", str(root), str(target), epoch=epoch)
    return target


def refuse_paths(root: Path, forbidden: Iterable[str]) -> None:
    """Raises: ValueError naming the first file with a path of the machine that builds."""
    words = [word.encode() for word in forbidden if word.count("/") > 1]  # /root alone is a word of many texts
    for path in _files(root):
        content = os.fsencode(os.readlink(path)) if path.is_symlink() else path.read_bytes()
        for word in words:
            if re.search(re.escape(word) + rb"(?![\w-])", content):
                raise ValueError(f"{path.relative_to(root)} names {word.decode()}, a path of this machine")


def debian_version(version: str = __version__) -> str:
    """Of a release of Python's: 1.0rc1 is older than 1.0 here, too, as 1.0~rc1."""
    return re.sub(r"\.?(a|b|rc|dev)(?=\d)", r"~\1", version)


def _control(version: str, architecture: str, size_kib: int, maintainer: str) -> str:
    major, minor = version.split(".")
    return f"""\
Package: gpusched
Version: {debian_version()}
Architecture: {architecture}
Maintainer: {maintainer}
Installed-Size: {size_kib}
Depends: python3 (>= {version}), python3 (<< {major}.{int(minor) + 1}), libc6
Recommends: systemd (>= 244), man-db
Suggests: bash-completion
Section: admin
Priority: optional
Description: batch scheduler for lab GPU servers
 Jobs wait in a queue until the GPUs they ask for are free: fair shares, GPU
 memory, retries, reservations, and the reason why a job waits. For one server,
 or several with one queue.
 .
 Nothing is started by this package: sudo gpusched system install
"""


def _copyright(epoch: int) -> str:
    year = time.gmtime(epoch).tm_year
    return (
        "Format: https://www.debian.org/doc/packaging-manuals/copyright-format/1.0/\n"
        "Comment: licences of the libraries in /opt/gpusched are in their *.dist-info folders\n\n"
        f"Files: *\nCopyright: {year} gpusched developers\nLicense: Apache-2.0\n"
        " On Debian systems: /usr/share/common-licenses/Apache-2.0\n"
    )


def _changelog(epoch: int, maintainer: str) -> str:
    date = time.strftime("%a, %d %b %Y %H:%M:%S +0000", time.gmtime(epoch))
    return (
        f"gpusched ({debian_version()}) unstable; urgency=medium\n\n  * See changelog.gz.\n\n -- {maintainer}  {date}\n"
    )


def _files(root: Path) -> Iterator[Path]:
    return (path for path in sorted(root.rglob("*")) if path.is_symlink() or path.is_file())


def _write(path: Path, content: bytes, mode: int = 0o644) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    path.chmod(mode)


def _link(path: Path, target: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(target)


def _gzip(content: bytes) -> bytes:
    return gzip.compress(content, 9, mtime=0)


def _pip() -> list[str]:
    return [sys.executable, "-m", "pip", "--disable-pip-version-check"]


def _run(*words: str, epoch: int) -> str:
    """What a command prints. Raises: SystemExit with its output."""
    environ = {**os.environ, "SOURCE_DATE_EPOCH": str(epoch), "PYTHONHASHSEED": "0", "LC_ALL": "C.UTF-8"}
    # The same from every machine, for any architecture.
    environ["GPUSCHED_COMPILE"] = "0"
    os.umask(0o022)
    done = subprocess.run(words, env=environ, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


def _epoch() -> int:
    given = os.environ.get("SOURCE_DATE_EPOCH")
    return int(given or _run("git", "-C", str(REPOSITORY), "log", "-1", "--format=%ct", epoch=0))


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.package", description=__doc__.partition("\n")[2])
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="where the files go")
    parser.add_argument("--python", default="/usr/bin/python3", help="the distribution's Python (%(default)s)")
    parser.add_argument("--constraint", metavar="FILE", help="versions of dependencies, as pip takes them")
    parser.add_argument("--maintainer", default=MAINTAINER, help="name and address in the Debian package")
    parser.add_argument("--wheel-only", action="store_true", help="no Debian package")
    options = parser.parse_args(words)
    options.folder.mkdir(parents=True, exist_ok=True)
    if not options.wheel_only and shutil.which("dpkg-deb") is None:
        raise SystemExit("there is no dpkg-deb to make the Debian package with: --wheel-only")
    epoch = _epoch()
    wheel = build_wheel(options.folder, epoch)
    print(wheel)
    if not options.wheel_only:
        keywords = {"python": options.python, "constraint": options.constraint, "maintainer": options.maintainer}
        print(build_package(wheel, options.folder, epoch, **keywords))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
