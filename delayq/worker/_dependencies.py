"""Makes the dependencies of one message, or of one run of the worker, and tears them down again."""

from __future__ import annotations

import inspect
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from contextlib import AsyncExitStack

    from delayq.worker._signatures import Dependency, Injected


class Scope:
    """The dependencies made so far, by type. Each one is made once, when it is first asked for."""

    def __init__(
        self, makers: Mapping[Any, Dependency], made: dict[Any, Any], stack: AsyncExitStack
    ) -> None:
        """Add objects to those that were ``made`` before, and tear them down with ``stack``."""
        self._makers = makers
        self._made = made
        self._stack = stack

    async def fill(self, parameters: Iterable[Injected]) -> dict[str, Any]:
        """Return the arguments for these parameters, by name."""
        return {parameter.name: await self.get(parameter.kind) for parameter in parameters}

    async def get(self, kind: Any) -> Any:
        """Return the dependency of this type."""
        if kind not in self._made:
            self._made[kind] = await self._make(self._makers[kind])
        return self._made[kind]

    async def _make(self, maker: Dependency) -> Any:
        arguments = await self.fill(maker.takes)
        if maker.yields and maker.is_async:
            return await self._stack.enter_async_context(
                asynccontextmanager(maker.function)(**arguments)
            )
        if maker.yields:
            return self._stack.enter_context(contextmanager(maker.function)(**arguments))
        result = maker.function(**arguments)
        return await result if inspect.isawaitable(result) else result
