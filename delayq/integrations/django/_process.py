"""The worker of a process of ``manage.py delayq_worker --processes``, for ``delayq worker``."""

import json
import os

import django

django.setup()

from delayq.integrations.django._workers import new_worker  # noqa: E402 - needs the apps

ARGUMENTS = "DELAYQ_DJANGO_WORKER"
"""The environment variable that has the arguments of :func:`new_worker`, as JSON."""

worker = new_worker(**json.loads(os.environ[ARGUMENTS]))
