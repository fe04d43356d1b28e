"""JSON bodies: read strictly, answered from the wire models. ``middleware.BodyLimit`` bounds their size."""

from typing import Any, TypeVar

from fastapi import Request
from pydantic import BaseModel, TypeAdapter, ValidationError
from starlette.responses import Response

from prorl_gym.api.http.error_responses import ApiError

BodyT = TypeVar("BodyT")


async def read_json(request: Request, adapter: TypeAdapter[BodyT], *, empty: bytes = b"") -> BodyT:
    """Read and validate a body.

    Args:
        request: the HTTP request.
        adapter: of the body's model.
        empty: replaces an empty body.

    Raises:
        ApiError: 413; 422, naming the first field that is wrong.
    """
    return parse_json(await request.body() or empty, adapter)


def parse_json(body: bytes, adapter: TypeAdapter[BodyT]) -> BodyT:
    """Validate a body.

    Raises:
        ApiError: 422, naming the first field that is wrong.
    """
    try:
        return adapter.validate_json(body, strict=True)  # "1" is no number, 1 is no boolean
    except ValidationError as error:
        first: Any = error.errors(include_url=False, include_context=False)[0]
        place = ".".join(str(part) for part in first["loc"][:8])[:200]
        where = f"The field '{place}' of the body" if place else "The body"
        message = first["msg"].removeprefix("Value error, ")[:300]
        raise ApiError(422, f"{where} is wrong: {message}.", "See /docs for the form.") from None


def json_response(answer: BaseModel) -> Response:
    """Return an answer."""
    return Response(answer.model_dump_json(), media_type="application/json")
