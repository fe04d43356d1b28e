"""What a route promises, in the form in which FastAPI wants to hear it: answers, errors and bodies with examples.

Bodies are read and bounded by us (``api.body``), so FastAPI does not know their models: ``body`` names the schema, and
``openapi.document`` adds it to the document's components.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from prorl_gym.api.schema import ErrorAnswer

ERRORS: Mapping[int, tuple[str, str, str]] = {
    400: ("The request cannot be meant.", "pool 'judge' is not one of this service.", "It has: policy."),
    401: (
        "No token, or a wrong one.",
        "The bearer token is missing or wrong.",
        "Send the content of the service's token file in the Authorization header, after 'Bearer'.",
    ),
    403: (
        "Sent by a page of another site, or an engine that is not on the allow-list.",
        "Another site's page sent this request.",
        "Open the service's own page.",
    ),
    404: ("There is none of that name.", "rollout a7 was never accepted.", ""),
    409: (
        "It does not fit what is there.",
        "rollout a7 was submitted before with another body.",
        "Send the same body again, or use a fresh rollout_id.",
    ),
    410: (
        "There was one; its record is not kept any more.",
        "The record of rollout a7 was acknowledged and is not kept any more.",
        "Raise ledger.keep_days to keep records for longer.",
    ),
    411: ("The body's length is not what its header says.", "The Content-Length header is wrong.", ""),
    413: ("The body is too large.", "The body is larger than 67108864 bytes.", "Send fewer rollouts at once."),
    422: (
        "A field or a parameter is wrong.",
        "The field 'task' of the body is wrong: Field required.",
        "See /docs for the form.",
    ),
    429: (
        "Too much is pending, or the ledger's budget is used up: send it again after the seconds of Retry-After.",
        "100000 rollouts are pending already.",
        "Send it again later.",
    ),
    500: (
        "A defect of the service; its log says more.",
        "The service is at fault.",
        "Its log has the traceback; please report it.",
    ),
    503: (
        "The service is stopping, or its disk failed or is full; Retry-After says when to send it again.",
        "The service takes no more work.",
        "Submit again when it is back.",
    ),
    504: (
        "It took longer than the configuration allows an answer to take.",
        "There was no result within 600 s.",
        "Raise http.compat.answer_seconds, or leave it out.",
    ),
}
"""Status -> when it is sent, and an example of ``what`` and ``fix``."""

GUARDED = (401, 403, 500)
"""What every route behind the token may answer."""

WITH_BODY = (413, 422)

REF = "#/components/schemas/{model}"


def answers(example: Any, errors: Sequence[int], text: str = "Done.") -> dict[int | str, dict[str, Any]]:
    """Return the ``responses`` of a route whose answer is JSON."""
    return {200: {"description": text, "content": {"application/json": {"example": example}}}, **_errors(errors)}


def streamed(media_type: str, example: str, model: type[BaseModel], errors: Sequence[int]) -> dict[int | str, Any]:
    """Return the ``responses`` of a route that answers in lines, each of which is a ``model``."""
    schema = {"$ref": REF.format(model=model.__name__)}
    line = {"description": "Lines of JSON.", "content": {media_type: {"itemSchema": schema, "example": example}}}
    return {200: line, **_errors(errors)}


def text(media_type: str, example: str, errors: Sequence[int], description: str) -> dict[int | str, Any]:
    """Return the ``responses`` of a route that answers in text."""
    content = {media_type: {"schema": {"type": "string"}, "example": example}}
    return {200: {"description": description, "content": content}, **_errors(errors)}


def body(model: type[BaseModel], example: Any, *, many: bool = False, required: bool = True) -> dict[str, Any]:
    """Return the ``openapi_extra`` of a route that reads a body.

    Args:
        model: of the body.
        example: of the body.
        many: a list of them is taken too.
        required: whether an empty body is an error.
    """
    schema: dict[str, Any] = {"$ref": REF.format(model=model.__name__)}
    if many:
        schema = {"anyOf": [schema, {"type": "array", "items": schema}]}
    content = {"application/json": {"schema": schema, "example": example}}
    return {"requestBody": {"required": required, "content": content}}


def _errors(statuses: Sequence[int]) -> dict[int | str, dict[str, Any]]:
    return {status: _error(status) for status in sorted({*statuses})}


def _error(status: int) -> dict[str, Any]:
    description, what, fix = ERRORS[status]
    example = {"error": {"what": what, "fix": fix}}
    return {"model": ErrorAnswer, "description": description, "content": {"application/json": {"example": example}}}
