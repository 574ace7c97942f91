"""``manage.py delayq_worker``."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import CommandError
from django.tasks import DEFAULT_TASK_BACKEND_ALIAS, task_backends
from django.tasks.exceptions import InvalidTaskBackend
from django.utils import autoreload

from delayq.errors import DelayqError
from delayq.integrations._exposure import exposure
from delayq.integrations.django._workers import CONCURRENCY, new_worker

if TYPE_CHECKING:
    from argparse import ArgumentParser

    # As in apps.py.
    from delayq.integrations.django._untyped import Untyped as BaseCommand
else:
    from django.core.management.base import BaseCommand

_PROCESS = "delayq.integrations.django._process"
_PORTS = 65_536


class Command(BaseCommand):
    """Runs the tasks of a backend until a signal."""

    help = (
        "Run tasks that were enqueued with a DelayqBackend. SIGTERM or Ctrl-C stops the worker"
        " gracefully: running tasks finish. A second signal cancels them."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument(
            "--backend",
            default=DEFAULT_TASK_BACKEND_ALIAS,
            choices=sorted(task_backends),
            help="The backend's key in TASKS.",
        )
        parser.add_argument(
            "--queue",
            action="append",
            dest="queues",
            default=[],
            metavar="NAME",
            help="Run the tasks of this queue only. May be repeated.",
        )
        parser.add_argument(
            "--concurrency",
            type=int,
            default=CONCURRENCY,
            metavar="N",
            help="The number of tasks that run at a time in a process; %(default)s by default.",
        )
        parser.add_argument(
            "--shutdown-timeout",
            type=float,
            default=30.0,
            metavar="SECONDS",
            help="How long a stop waits for running tasks; %(default)s by default.",
        )
        parser.add_argument(
            "--processes",
            type=int,
            default=1,
            metavar="N",
            help="The number of processes. More than one needs the extra `cli`.",
        )
        parser.add_argument(
            "--health",
            metavar="HOST:PORT",
            help=(
                "Answer probes and autoscalers at this address: /livez, /readyz, /scale/QUEUE, and"
                " /metrics where the extra `prometheus` is installed. Further processes use the"
                " next ports."
            ),
        )
        parser.add_argument(
            "--metrics-port",
            type=int,
            metavar="PORT",
            help=(
                "Serve Prometheus metrics on this port; further processes use the next ports. Needs"
                " the extra `prometheus`."
            ),
        )
        parser.add_argument(
            "--metrics-host",
            default="127.0.0.1",
            metavar="HOST",
            help="The address to serve metrics on; %(default)s by default.",
        )
        parser.add_argument("--burst", action="store_true", help="Exit when no more tasks are due.")
        parser.add_argument(
            "--reload",
            action="store_true",
            help="Restart when code changes, for development: running tasks are abandoned.",
        )

    def handle(self, *_args: str, **options: Any) -> None:
        """Run the worker.

        Raises:
            CommandError: It could not be started.
        """
        arguments = {
            "alias": options["backend"],
            "queues": options["queues"],
            "concurrency": options["concurrency"],
            "shutdown_timeout": options["shutdown_timeout"],
        }
        if options["processes"] < 1:
            raise CommandError("--processes must be at least 1")
        if options["reload"] and (options["processes"] > 1 or options["burst"]):
            raise CommandError("--reload goes with neither --processes nor --burst")
        if options["metrics_port"] is not None:
            if not 0 < options["metrics_port"] < _PORTS:
                raise CommandError(f"--metrics-port must be from 1 to {_PORTS - 1}")
            if find_spec("prometheus_client") is None:
                raise CommandError(
                    "--metrics-port needs the extra `prometheus`: pip install 'delayq[prometheus]'"
                )
        if options["processes"] > 1:
            self._run_processes(arguments, options)
        elif options["reload"]:
            autoreload.run_with_reloader(self._run, arguments, options)
        else:
            self._run(arguments, options)

    def _run(self, arguments: dict[str, Any], options: dict[str, Any]) -> None:
        port = options["metrics_port"]
        metrics = None if port is None else (options["metrics_host"], port)
        try:
            worker = new_worker(**arguments)

            def started() -> None:
                if options["verbosity"]:
                    self.stdout.write(f"{worker!r} runs tasks. Quit it with Ctrl-C.")

            exposed = exposure(metrics=metrics, health=options["health"])
            asyncio.run(worker.run(burst=options["burst"], started=started, **exposed))
        except (DelayqError, ImproperlyConfigured, InvalidTaskBackend) as error:
            raise CommandError(str(error)) from error

    def _run_processes(self, arguments: dict[str, Any], options: dict[str, Any]) -> None:
        """Become ``delayq worker``, which starts processes, and replaces those that die."""
        if find_spec("typer") is None:
            raise CommandError("--processes needs the extra `cli`: pip install 'delayq[cli]'")
        # Django's --pythonpath, and the directory of manage.py, are not in the environment.
        path = os.pathsep.join(filter(None, sys.path))
        os.environ.update(PYTHONPATH=path, DELAYQ_DJANGO_WORKER=json.dumps(arguments))
        command = [sys.executable, "-m", "delayq", "worker", f"{_PROCESS}:worker"]
        command += [f"--processes={options['processes']}"]
        for name in ("health", "metrics_port", "metrics_host"):
            if options[name] is not None:
                command.append(f"--{name.replace('_', '-')}={options[name]}")
        if options["burst"]:
            command.append("--burst")
        self.stdout.flush()
        os.execv(sys.executable, command)  # noqa: S606 - no shell is what is wanted
