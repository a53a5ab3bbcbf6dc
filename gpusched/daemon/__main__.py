"""`python -m gpusched.daemon`: what the first client starts."""

from __future__ import annotations

import sys

from gpusched.daemon.main import main

if __name__ == "__main__":
    sys.exit(main())
