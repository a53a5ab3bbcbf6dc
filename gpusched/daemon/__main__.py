"""`python -m gpusched.daemon`: the command that the first client runs to start the daemon."""

from __future__ import annotations

import sys

from gpusched.daemon.main import main

if __name__ == "__main__":
    sys.exit(main())
