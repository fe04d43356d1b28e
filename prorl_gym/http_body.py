"""The body of an HTTP response, read up to a limit: what sends it may be broken or hostile."""

import aiohttp

_CHUNK_BYTES = 64 << 10


async def read_body(response: aiohttp.ClientResponse, max_bytes: int) -> bytes | None:
    """Return the whole body; ``None``: it is longer than ``max_bytes``, and the rest is not read."""
    body = bytearray()
    async for chunk in response.content.iter_chunked(_CHUNK_BYTES):
        body += chunk
        if len(body) > max_bytes:
            return None
    return bytes(body)
