"""Runs the service's loops without the API, or backs up or restores a home (DRAY_HOME).

Without a command, this program runs the loops, such as the scheduler and the reconciler. The API
runs in other processes, which `python -m api --no-loops` starts. With PostgreSQL, several services
can run: one service holds the lease for the loops, and the other services wait for the lease.
`backup DEST.tar` copies the home (DRAY_HOME), even while its service is running; `restore SRC.tar
--home NEW` restores a copy to a new home.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from service.config import logging_setup
from service.config.home_lock import write_privately
from service.config.settings import read_settings
from service.config.start_refusals import StartRefused
from service.config.tokens_file import load_tokens
from service.domain.errors import DomainError
from service.runtime import serve_loops
from service.storage.backup import BackupError, backup, restore


async def serve() -> None:
    """Run the loops until SIGTERM or SIGINT."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    settings = read_settings()
    if settings.tokens_file is not None:
        load_tokens(settings.tokens_file)
    logging_setup.configure(settings.log_format)
    await serve_loops(settings, stop)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program and return its exit code."""
    options = _parse(arguments)
    write_privately()
    try:
        if options.command == "backup":
            done = backup(read_settings(), options.dest.absolute())
            _print_line(
                f"backed up {done.num_jobs} jobs and {done.num_files} files to {options.dest}"
            )
            if not done.has_files:
                _print_line(
                    "the storage is not a local folder and is not in the backup: copy it "
                    "separately now"
                )
        elif options.command == "restore":
            done = restore(options.source, options.home)
            _print_line(
                f"restored {done.num_jobs} jobs and {done.num_files} files to {options.home}"
            )
            _print_line(
                "to use the restored home, start the service with DRAY_HOME set to this folder"
            )
        else:
            asyncio.run(serve())
    except (BackupError, StartRefused, DomainError, ValueError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m service", description=__doc__)
    commands = parser.add_subparsers(dest="command", metavar="command")
    taking = commands.add_parser("backup", help="copy the home folder (DRAY_HOME) to a tar file")
    taking.add_argument("dest", type=Path, help="the tar file to write; it must not exist")
    putting = commands.add_parser("restore", help="restore a backup to a new home")
    putting.add_argument("source", type=Path, help="a tar file written by `backup`")
    putting.add_argument(
        "--home",
        type=Path,
        required=True,
        help="the new home: a folder that is empty or does not exist",
    )
    return parser.parse_args(arguments)


def _print_line(line: str) -> None:
    sys.stdout.write(f"{line}\n")


if __name__ == "__main__":
    sys.exit(main())
