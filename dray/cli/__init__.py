"""The `dray` command. Each command imports its modules when it runs, so that `--help` is fast."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line and exit; see `dray --help` for the exit codes."""
    from dray.cli.app import run

    sys.exit(run(list(sys.argv[1:] if argv is None else argv)))
