"""The outbox: messages that are written in the transaction of the data they are about, and stored
in their queues after its commit: ``pip install 'delayq[outbox]'``.

See :class:`Outbox`. SQLAlchemy is imported with this class.
"""

import typing

from delayq import _lazy_imports

if typing.TYPE_CHECKING:
    from delayq.outbox._outbox import Outbox
    from delayq.outbox._relay import Relay, RelayCounts

__all__ = ["Outbox", "Relay", "RelayCounts"]

_HOMES = {"Outbox": "_outbox", "Relay": "_relay", "RelayCounts": "_relay"}

if not typing.TYPE_CHECKING:
    __getattr__, __dir__ = _lazy_imports.names(__name__, _HOMES)
