"""A prompt as JSON text, written once: the work of a turn must not grow with the turns before it.

A prompt of 64,000 ids takes some 4 ms to write as JSON and as long to read back where a server echoes it. A caller that
keeps the text of its prompt (``GenerationRequest.prompt_ids_json``) saves both: the text is put into the request as it
is, and an echo of the same bytes is checked and cut out before anything is parsed.
"""

import json

from prorl_gym.inference.protocol import GenerationRequest

_ECHO = b'"prompt_token_ids":['


def encode_prompt_ids(request: GenerationRequest) -> bytes:
    """Return the prompt ids as JSON without brackets: ``5,6,7``.

    A text that the caller kept is checked at both ends only: counting its ids would cost as much as a short turn.

    Raises:
        ValueError: the caller's text is of other ids: a defect that would be drift.
    """
    kept, ids = request.prompt_ids_json, request.prompt_ids
    if kept is None:
        return json.dumps(list(ids), separators=(",", ":"))[1:-1].encode()
    first, last = (str(ids[0]).encode(), str(ids[-1]).encode()) if ids else (b"", b"")
    if len(ids) < 2:
        belongs = kept == first
    else:
        belongs = kept.startswith(first + b",") and kept.endswith(b"," + last) and len(kept) >= 2 * len(ids) - 1
    if not belongs:
        raise ValueError("prompt_ids_json does not belong to prompt_ids")
    return kept


def strip_prompt_echo(payload: bytes, request: GenerationRequest) -> tuple[bytes, bool]:
    """Take an echo of the prompt out of an answer, if it is there in the very bytes that were sent.

    No string inside the answer can contain it: there, quotes are escaped. The key is searched and what follows it
    compared: searching the whole prompt would cost more than the rest of a turn.

    Returns:
        The answer, and whether such an echo was in it. Any other echo is still there, to be read and compared.
    """
    if request.prompt_ids_json is None:
        return payload, False
    sent = encode_prompt_ids(request) + b"]"
    place = payload.find(_ECHO)
    while place >= 0:
        begin = place + len(_ECHO)
        if payload.startswith(sent, begin):
            return payload[: begin - 1] + b"null" + payload[begin + len(sent) :], True
        place = payload.find(_ECHO, begin)
    return payload, False
