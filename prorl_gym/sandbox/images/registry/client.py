"""A client of image registries: the reading half of the OCI distribution specification.

The registry is not trusted: everything is bounded and compared with its digest.
"""

import asyncio
import hashlib
import os
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from prorl_gym.errors import FailureKind, SandboxError
from prorl_gym.sandbox.images.registry.http import (
    RegistryHttp,
    Retries,
    TransientError,
    read_bounded,
)
from prorl_gym.sandbox.images.registry.oci_format import (
    ACCEPT,
    Descriptor,
    ImageConfig,
    Index,
    Manifest,
    RegistryReference,
    parse_model,
    select_platform,
)

_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True)
class RegistryImage:
    """The manifest of an image, as the registry states it."""

    reference: RegistryReference
    digest: str
    """Digest of the manifest."""
    config: Descriptor
    layers: tuple[Descriptor, ...]
    """Lowest first."""


class RegistryClient:
    """Reads images of any registry, or of its mirror (URL by host); one per event loop, closed by its owner."""

    def __init__(self, mirrors: Mapping[str, str], retries: Retries | None, login_host: str) -> None:
        self._mirrors = mirrors
        self._retries = retries or Retries()
        self._http = RegistryHttp(login_host)
        self._authorizations: dict[str, str] = {}
        """API of a repository -> the ``Authorization`` that it accepted."""

    async def close(self) -> None:
        await self._http.close()

    async def fetch_image(self, reference: RegistryReference) -> RegistryImage:
        """Read the manifest of this machine's image."""
        digest, found = await self._fetch_manifest(reference, reference.tag_or_digest)
        if isinstance(found, Index):
            digest, found = await self._fetch_manifest(reference, select_platform(found, str(reference)).digest)
        if isinstance(found, Index):
            raise SandboxError(FailureKind.IMAGE_BROKEN, f"{reference}: an index of indexes.", "Name one image of it.")
        return RegistryImage(reference, digest, found.config, found.layers)

    async def fetch_environment(self, image: RegistryImage) -> tuple[tuple[str, str], ...]:
        """Return the variables that the image's author set."""
        where = f"{image.reference} (configuration)"
        path = f"/blobs/{image.config.digest}"
        data = await self._retries.run(where, lambda: self._get_small(image.reference, path, "*/*"))
        _check_digest(data, image.config.digest, where)
        return parse_model(ImageConfig, data, where).environment

    async def _fetch_manifest(self, reference: RegistryReference, selector: str) -> tuple[str, Manifest | Index]:
        where = str(reference)
        data = await self._retries.run(where, lambda: self._get_small(reference, f"/manifests/{selector}", ACCEPT))
        digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
        if selector.startswith("sha256:"):
            _check_digest(data, selector, where)
        model = Index if b'"manifests"' in data and b'"layers"' not in data else Manifest
        return digest, parse_model(model, data, where)

    async def fetch_blob(self, reference: RegistryReference, blob: Descriptor, directory: Path) -> Path:
        """Download a blob into ``directory``, continuing an earlier attempt, and verify it.

        The caller holds its lock.
        """
        partial = _PartialBlob(directory, blob)
        try:
            await asyncio.to_thread(partial.load_existing)
            resumed = partial.size > 0
            await self._download(reference, blob, partial)
            try:
                partial.verify()
            except SandboxError:
                if not resumed:
                    raise
                # A crash may have torn what an earlier process left: download all of it once more.
                await self._download(reference, blob, partial)
                partial.verify()
        finally:
            partial.close()
        return partial.path

    async def _download(self, reference: RegistryReference, blob: Descriptor, partial: "_PartialBlob") -> None:
        if not partial.is_complete:
            where = f"{reference} (layer {blob.digest[7:19]})"
            await self._retries.run(where, lambda: self._download_once(reference, blob, partial))

    async def _download_once(self, reference: RegistryReference, blob: Descriptor, into: "_PartialBlob") -> None:
        headers = {"Range": f"bytes={into.size}-"} if into.size else {}
        async with self._get(reference, f"/blobs/{blob.digest}", headers) as response:
            continued = response.headers.get("Content-Range", "").startswith(f"bytes {into.size}-")
            if into.size and not continued:
                into.reset()
                if response.status != 200:
                    raise TransientError("the registry does not continue the download")
            async for data in response.content.iter_chunked(_CHUNK):
                await asyncio.to_thread(into.append, data)
        if not into.is_complete:
            raise TransientError(f"the connection ended after {into.size} of {blob.size} bytes")

    async def _get_small(self, reference: RegistryReference, path: str, accept: str) -> bytes:
        async with self._get(reference, path, {"Accept": accept}) as response:
            return await read_bounded(response, str(reference))

    @asynccontextmanager
    async def _get(
        self, reference: RegistryReference, path: str, headers: Mapping[str, str]
    ) -> AsyncGenerator[aiohttp.ClientResponse]:
        api = reference.api_url(self._mirrors)
        async with self._http.get(api + path, headers, self._authorizations.get(api)) as response:
            if response.status != 401:
                yield _check_response(response, reference)
                return
            challenges = response.headers.getall("WWW-Authenticate", [])
        answer = await self._http.answer_challenges(api, challenges)
        if answer is None:
            raise _response_error(reference, 401)
        self._authorizations[api] = answer
        async with self._http.get(api + path, headers, answer) as response:
            yield _check_response(response, reference)


class _PartialBlob:
    """The file of a blob that may be incomplete: continued, bounded by the promised size, verified.

    The caller holds the lock of its digest. Everything but ``close`` and ``is_complete`` blocks on the disk.
    """

    def __init__(self, directory: Path, blob: Descriptor) -> None:
        self.path = directory / f"{blob.digest.replace(':', '-')}.part"
        self._blob = blob
        self._file = open(os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600), "r+b")
        self._digest = hashlib.sha256()
        self.size = 0
        """Bytes that are here."""

    def load_existing(self) -> None:
        """Take over what an earlier attempt left."""
        while data := self._file.read(_CHUNK):
            self._digest.update(data)
            self.size += len(data)
        if self.size > self._blob.size:
            self.reset()

    def reset(self) -> None:
        self._file.seek(0)
        self._file.truncate()
        self._digest = hashlib.sha256()
        self.size = 0

    def append(self, data: bytes) -> None:
        """Append downloaded bytes; empties the file when the blob is longer than promised."""
        if self.size + len(data) > self._blob.size:
            self.reset()
            raise _broken(f"blob {self._blob.digest} is longer than the {self._blob.size} bytes its manifest promises.")
        self._file.write(data)
        self._digest.update(data)
        self.size += len(data)

    @property
    def is_complete(self) -> bool:
        """Whether every byte is here; ``verify`` checks them."""
        return self.size == self._blob.size

    def verify(self) -> None:
        """Compare with the digest; empties the file when it differs."""
        self._file.flush()
        found = f"sha256:{self._digest.hexdigest()}"
        if found != self._blob.digest:
            self.reset()
            raise _broken(f"blob {self._blob.digest} has other contents ({found}).")

    def close(self) -> None:
        """Close the file and keep it for the next attempt."""
        self._file.close()


def _broken(what: str) -> SandboxError:
    return SandboxError(FailureKind.IMAGE_BROKEN, what, "The registry or a proxy is damaged: use another (--mirror).")


def _check_response(response: aiohttp.ClientResponse, reference: RegistryReference) -> aiohttp.ClientResponse:
    if response.status in (200, 206, 416):  # 416: the range to continue with is empty; only a download sends one
        return response
    raise _response_error(reference, response.status)


def _response_error(reference: RegistryReference, status: int) -> SandboxError:
    if status in (401, 403, 404):
        return SandboxError(
            FailureKind.IMAGE_MISSING,
            f"{reference}: the registry gives no such image (HTTP {status}).",
            "Check the name; log in (`docker login`, `apptainer registry login`) if it is not public.",
        )
    return SandboxError(FailureKind.SANDBOX_UNAVAILABLE, f"{reference}: the registry answered HTTP {status}.")


def _check_digest(data: bytes, digest: str, where: str) -> None:
    if f"sha256:{hashlib.sha256(data).hexdigest()}" != digest:
        raise _broken(f"{where}: its contents do not have the digest {digest}.")
