"""One process of ``delayq worker``: ``python -m delayq.cli.worker.child [options] MODULE:ATTRIBUTE
LIFELINE REPORT``.

LIFELINE and REPORT are file descriptors. The end of the first means that the parent is gone, and
that this process is to stop; it comes also when the parent was killed. On the second goes one line:
``ready`` and what the worker does, as JSON, or why it could not start.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import importlib
import json
import logging
import os
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

import delayq
from delayq.cli.output import CommandFailed, clean
from delayq.client import URL_VARIABLE
from delayq.integrations._exposure import exposure

if TYPE_CHECKING:
    from delayq.integrations._exposure import Exposure

# How long after its deadline a process whose parent is gone is ended by force, seconds.
_KILL_AFTER = 10.0


def find(reference: str, *, url: bool = False) -> delayq.Worker:
    """Import the worker that ``module:attribute`` names, and check that it has a server. Raises
    CommandFailed.

    ``url``: the worker must use the address that the command was given.
    """
    worker = import_worker(reference)
    if worker.needs_address and not os.environ.get(URL_VARIABLE):
        raise CommandFailed(
            f"no server given: set ${URL_VARIABLE}, or give the worker an address:"
            ' delayq.Worker("redis://..."); delayq.Worker("embedded:") starts a private one'
        )
    if url:
        require_no_server(worker, reference)
    return worker


def require_no_server(worker: delayq.Worker, reference: str) -> None:
    """Raise CommandFailed if a worker names its server, so that --url cannot."""
    if not worker.needs_address:
        raise CommandFailed(
            f"--url has no effect on {reference}, which names its server itself: make it"
            " delayq.Worker()"
        )


def import_worker(reference: str) -> delayq.Worker:
    """Import the worker that ``module:attribute`` names. Raises CommandFailed."""
    member = import_attribute(reference, "app.jobs:worker")
    if not isinstance(member, delayq.Worker):
        raise CommandFailed(f"{reference} is a {type(member).__name__}, not a delayq.Worker")
    return member


def import_attribute(reference: str, example: str) -> object:
    """Import what ``module:attribute`` names, as the example does. Raises CommandFailed."""
    module_name, colon, attribute = reference.partition(":")
    if not (module_name and colon and attribute):
        raise CommandFailed(f"{reference!r} is not of the form module:attribute, such as {example}")
    try:
        member: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and (
            module_name == error.name or module_name.startswith(f"{error.name}.")
        ):
            raise CommandFailed(f"there is no module {error.name!r} in {Path.cwd()}") from None
        traceback.print_exc()
        raise CommandFailed(f"importing {module_name!r} failed: {error}") from None
    except Exception as error:  # noqa: BLE001 - whatever that module does
        traceback.print_exc()
        raise CommandFailed(
            f"importing {module_name!r} failed: {type(error).__name__}: {error}"
        ) from None
    for name in attribute.split("."):
        try:
            member = getattr(member, name)
        except AttributeError:
            raise CommandFailed(f"module {module_name!r} has no attribute {attribute!r}") from None
    found: object = member
    return found


def log_to_stderr(level: str) -> None:
    """Print what is logged, from a level on, for people. Of what is logged for debugging, only
    delayq's is printed.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(_LogLines("%(asctime)s %(process)d %(levelname)s %(name)s: %(message)s"))
    number = getattr(logging, level.upper())
    logging.basicConfig(level=max(number, logging.INFO), handlers=[handler])
    logging.getLogger("delayq").setLevel(number)


def main() -> int:
    """Run the worker. Return 0, or 2 if it could not be started, or 1 if it failed later."""
    parser = argparse.ArgumentParser()
    parser.add_argument("where")
    parser.add_argument("lifeline", type=int)
    parser.add_argument("report", type=int)
    parser.add_argument("--burst", action="store_true")
    parser.add_argument("--log-level", default="info")
    parser.add_argument("--metrics", metavar="HOST:PORT", type=_host_port)
    parser.add_argument("--health", metavar="HOST:PORT")
    parser.add_argument("--url", action="store_true")
    options = parser.parse_args()
    # After the import of delayq, so that no module in that directory can shadow its imports.
    sys.path.insert(0, str(Path.cwd()))
    parent = _Report(options.report)
    log_to_stderr(options.log_level)
    try:
        worker = find(options.where, url=options.url)
        asyncio.run(
            _run(
                worker,
                options.lifeline,
                parent,
                exposure(metrics=options.metrics, health=options.health),
                burst=options.burst,
            )
        )
    except (CommandFailed, delayq.DelayqError) as error:
        if parent.tell(str(error)):
            return 2
        traceback.print_exc()
        return 1
    except KeyboardInterrupt:
        return 130
    except Exception as error:  # noqa: BLE001 - a lifespan's, or a dependency's
        traceback.print_exc()
        return (
            2 if parent.tell(f"the worker could not start: {type(error).__name__}: {error}") else 1
        )
    return 0


def _host_port(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    return host, int(port)


async def _run(
    worker: delayq.Worker,
    lifeline: int,
    parent: _Report,
    exposed: Exposure,
    *,
    burst: bool,
) -> None:
    loop = asyncio.get_running_loop()

    def wait_for_the_end() -> None:
        # No process ever writes to it: this returns when the parent is gone.
        os.read(lifeline, 1)
        loop.call_soon_threadsafe(worker.stop)
        time.sleep(worker.shutdown_timeout + _KILL_AFTER)
        os._exit(1)

    def ready() -> None:
        # What was imported by now stays. A full collection that scans it would pause all handlers,
        # and one is due soon after a start.
        gc.collect()
        gc.freeze()
        facts = {
            "server": worker.client.label,
            "queues": worker.queues,
            "concurrency": worker.concurrency,
        }
        parent.tell(f"ready {json.dumps(facts)}")

    # A thread, because a handler may block the loop; a daemon, because it may wait forever.
    threading.Thread(target=wait_for_the_end, daemon=True, name="lifeline").start()
    await worker.run(burst=burst, started=ready, **exposed)


class _LogLines(logging.Formatter):
    """Formats log records. Text in messages and errors begins no line and controls no terminal."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - by logging
        return clean(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:  # noqa: N802
        lines = super().formatException(ei).split("\n")
        return "\n".join(f"  {clean(line)}" for line in lines)


class _Report:
    def __init__(self, descriptor: int) -> None:
        self._descriptor: int | None = descriptor

    def tell(self, line: str) -> bool:
        """Report a line, unless one has been reported already. Returns whether it was reported."""
        if self._descriptor is None:
            return False
        descriptor, self._descriptor = self._descriptor, None
        with open(descriptor, "wb") as pipe:  # noqa: PTH123 - it has no path
            pipe.write(" ".join(line.split()).encode() + b"\n")
        return True


def _end(status: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    logging.shutdown()
    # Not sys.exit(), because a sync handler that hangs in a thread would keep the process alive.
    os._exit(status)


if __name__ == "__main__":
    _end(main())
