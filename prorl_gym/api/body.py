"""Reading request bodies: bounded before they are parsed, strict afterwards."""

from typing import Any, TypeVar

from fastapi import Request
from pydantic import TypeAdapter, ValidationError

from prorl_gym.api.answers import Refusal

ModelT = TypeVar("ModelT")


async def read_body(request: Request, limit: int) -> bytes:
    """Read a body.

    Args:
        request: the HTTP request.
        limit: bytes; more is refused before it is held in memory.

    Raises:
        Refusal: 413.
    """
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and (len(declared) > 18 or int(declared) > limit):
        raise _too_large(limit)  # before a byte of it is read
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > limit:
            raise _too_large(limit)
    return bytes(body)


def parse_body(body: bytes, adapter: TypeAdapter[ModelT]) -> ModelT:
    """Validate a JSON body.

    Raises:
        Refusal: 422, naming the first field that is wrong.
    """
    try:
        return adapter.validate_json(body, strict=True)  # "1" is no number, 1 is no boolean
    except ValidationError as error:
        raise _wrong(error) from None


def _too_large(limit: int) -> Refusal:
    fix = "Send fewer rollouts at once, or raise http.max_body_bytes."
    return Refusal(413, f"The body is larger than {limit} bytes.", fix)


def _wrong(error: ValidationError) -> Refusal:
    first: Any = error.errors(include_url=False, include_context=False)[0]
    place = ".".join(str(part) for part in first["loc"][:8])[:200]
    where = f"The field '{place}' of the body" if place else "The body"
    return Refusal(
        422, f"{where} is wrong: {first['msg'].removeprefix('Value error, ')[:300]}.", "See /docs for the form."
    )
