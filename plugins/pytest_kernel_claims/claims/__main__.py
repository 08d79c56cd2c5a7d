"""The command line: ``python -m pytest_kernel_claims.claims``."""

from __future__ import annotations

import argparse
import sys

from pytest_kernel_claims.claims import audit, change, merge, selection, summary, timetable, verdict


def main(argv: list[str] | None = None) -> int:
    """Run a command on claims files; returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m pytest_kernel_claims.claims")
    commands = parser.add_subparsers(required=True)
    merge.add_command(commands)
    timetable.add_command(commands)
    summary.add_command(commands)
    verdict.add_command(commands)
    audit.add_command(commands)
    selection.add_command(commands)
    change.add_command(commands)
    options = parser.parse_args(argv)
    try:
        return int(options.run(options))
    except (OSError, ValueError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    sys.exit(main())
