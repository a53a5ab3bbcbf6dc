"""The options of gpuschedd, apart from it: help and manual pages need nothing of the daemon."""

from __future__ import annotations

import argparse

from gpusched import __version__, paths


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gpuschedd",
        description="The scheduler daemon, in the foreground. Usually the first gsub starts it for you.",
        epilog="example: gpuschedd   (stop it with Ctrl-C or: gpusched daemon stop; jobs keep running)",
    )
    parser.add_argument("--version", action="version", version=f"gpuschedd {__version__}")
    parser.add_argument(
        "--ready-fd", type=int, metavar="N", help="write one line to this descriptor when the socket answers"
    )
    parser.add_argument(
        "--system",
        action="store_true",
        help=f"serve all users of this machine, as root: settings in {paths.SYSTEM_CONFIG}, state in "
        f"{paths.SYSTEM_STATE}, socket {paths.SYSTEM_SOCKET}",
    )
    parser.add_argument("--root", metavar="DIR", help="with --system: keep all of these below DIR, for testing")
    return parser
