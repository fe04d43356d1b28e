"""Closing what a test has opened, however its block ends."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Protocol, TypeVar


class Closable(Protocol):
    async def close(self) -> object: ...


ResourceT = TypeVar("ResourceT", bound=Closable)


@asynccontextmanager
async def closing(resource: ResourceT) -> AsyncGenerator[ResourceT]:
    try:
        yield resource
    finally:
        await resource.close()
