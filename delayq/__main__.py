"""The ``delayq`` command, also available as ``python -m delayq``."""

from __future__ import annotations

import sys
from importlib.util import find_spec

from delayq._version import __version__

# The packages that the extra `cli` installs.
_PACKAGES = ("typer", "rich")


def main() -> int:
    """Run the command line, and return its exit status."""
    if sys.argv[1:] == ["--version"]:
        # Without the command line, whose imports take a second on a slow machine.
        print(__version__)  # noqa: T201
        return 0
    try:
        if missing := [name for name in _PACKAGES if find_spec(name) is None]:
            print(  # noqa: T201
                f"delayq: {missing[0]} is missing: pip install 'delayq[cli,embedded]'",
                file=sys.stderr,
            )
            return 2
        from delayq.cli.app import run  # noqa: PLC0415 - only after checking that it can be imported

        return run()
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
