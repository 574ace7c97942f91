"""The ``OPTIONS`` of a backend."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from delayq._durations import seconds
from delayq._reliable.settings import Settings, SettingsOptions
from delayq.errors import BadInput

if TYPE_CHECKING:
    from collections.abc import Mapping

    from delayq._durations import Duration

_SETTINGS = frozenset(SettingsOptions.__annotations__)
_OWN = frozenset({"url", "prefix", "timeout"})


@dataclass(frozen=True)
class Options:
    """The ``OPTIONS`` of a backend, which have been checked.

    Attributes:
        url: The server's address; None for ``$DELAYQ_URL``.
        prefix: Put in front of the names of queues.
        timeout: How long a task may run; None for no limit.
        settings: The settings of the queues.
    """

    url: str | None = None
    prefix: str = ""
    timeout: Duration | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, given: object) -> Options:
        """Return the options.

        Raises:
            BadInput: One is unknown or invalid.
        """
        if not isinstance(given, dict):
            raise BadInput(f"OPTIONS must be a dict, not {given!r}")
        if unknown := sorted(str(name) for name in given if name not in _SETTINGS | _OWN):
            raise BadInput(
                f"there is no option {unknown[0]!r}, only {', '.join(sorted(_SETTINGS | _OWN))}"
            )
        url, prefix, timeout = given.get("url"), given.get("prefix", ""), given.get("timeout")
        for name, value in (("url", url or ""), ("prefix", prefix)):
            if not isinstance(value, str):
                raise BadInput(f"{name} must be a str, not {value!r}")
        if timeout is not None and not seconds(timeout, "timeout"):
            raise BadInput("timeout must be more than 0")
        settings = {name: value for name, value in given.items() if name in _SETTINGS}
        Settings(**settings).check()
        return cls(url or None, prefix, timeout, settings)

    def of_listener(self) -> dict[str, Any]:
        """Return the settings that a worker has a use for."""
        return {name: value for name, value in self.settings.items() if name != "durability"}
