"""`gpusched metrics`."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from gpusched.errors import UsageError
from gpusched.model.metrics import FORMATS, PROMETHEUS
from gpusched.model.units import printable


def metrics(
    output_file: Annotated[
        str | None,
        typer.Option(
            "--output", "-o", metavar="FILE", help="Replace this file, for node_exporter's textfile collector."
        ),
    ] = None,
    listen: Annotated[
        str | None,
        typer.Option(
            "--listen", metavar="IP:PORT", help="Serve http://IP:PORT/metrics until stopped; port 0 picks a free one."
        ),
    ] = None,
    form: Annotated[
        str | None,
        typer.Option(
            "--format",
            metavar="FORMAT",
            help="prometheus (default) or openmetrics; over HTTP the client negotiates it.",
        ),
    ] = None,
) -> None:
    """Print metrics of the queue, GPUs, users and the daemon for Prometheus.

    Exit code 1 when the daemon does not answer; FILE and HTTP then report gpusched_up 0.

    example: gpusched metrics --listen 127.0.0.1:9835
    """
    from gpusched.addons.metrics import exporter  # an HTTP server, not needed by other commands

    if listen is not None and (output_file is not None or form is not None):
        raise UsageError("--listen excludes --output and --format", "see: gpusched metrics --help")
    if form is not None and form not in FORMATS:
        raise UsageError(f"{printable(form, 40)!r} is not a format", f"formats: {', '.join(FORMATS)}")
    if listen is not None:
        exporter.serve(listen)
    elif output_file is not None:
        exporter.write(output_file, form or PROMETHEUS)
    else:
        sys.stdout.write(exporter.read(form or PROMETHEUS))
