"""Helpers of the image tests: layers made by hand, a pusher for the HTTP API of registries, a registry of our own."""

import gzip
import hashlib
import io
import json
import tarfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from aiohttp import web

MANIFEST = "application/vnd.oci.image.manifest.v1+json"
LAYER = "application/vnd.oci.image.layer.v1.tar+gzip"
CONFIG = "application/vnd.oci.image.config.v1+json"


def digest_of(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def entry(name: str, data: bytes = b"", *, kind: bytes = tarfile.REGTYPE, mode: int = 0o644, link: str = "") -> Any:
    info = tarfile.TarInfo(name)
    info.type, info.mode, info.linkname, info.size, info.mtime = kind, mode, link, len(data), 1_600_000_000
    return info, data


def directory(name: str, mode: int = 0o755) -> Any:
    return entry(name, kind=tarfile.DIRTYPE, mode=mode)


def symlink(name: str, target: str) -> Any:
    return entry(name, kind=tarfile.SYMTYPE, link=target, mode=0o777)


def tar(*entries: Any) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for info, data in entries:
            archive.addfile(info, io.BytesIO(data))
    return file.getvalue()


def layer(*entries: Any) -> bytes:
    return gzip.compress(tar(*entries), mtime=0)


def config(env: Sequence[str] = ("PATH=/opt/env/bin:/usr/bin",)) -> bytes:
    return json.dumps({"architecture": "amd64", "os": "linux", "config": {"Env": list(env)}}).encode()


def manifest(layers: Sequence[bytes], settings: bytes) -> bytes:
    def descriptor(media_type: str, data: bytes) -> dict[str, Any]:
        return {"mediaType": media_type, "digest": digest_of(data), "size": len(data)}

    return json.dumps(
        {
            "schemaVersion": 2,
            "mediaType": MANIFEST,
            "config": descriptor(CONFIG, settings),
            "layers": [descriptor(LAYER, data) for data in layers],
        }
    ).encode()


async def push(url: str, repository: str, tag: str, layers: Sequence[bytes]) -> str:
    """Push an image over the HTTP API of any registry; return its digest."""
    async with aiohttp.ClientSession(f"{url}/v2/{repository}/", raise_for_status=True) as session:
        for blob in (*layers, config()):
            async with session.post("blobs/uploads/") as started:
                place = aiohttp.client.URL(started.headers["Location"])
            place = aiohttp.client.URL(url).join(place).update_query(digest=digest_of(blob))
            async with session.put(place, data=blob, headers={"Content-Type": "application/octet-stream"}):
                pass
        data = manifest(layers, config())
        async with session.put(f"manifests/{tag}", data=data, headers={"Content-Type": MANIFEST}):
            return digest_of(data)


Fault = Callable[[web.Request], web.StreamResponse | None]


@dataclass
class FakeRegistry:
    """A registry in this process: serves what it is given, counts what it is asked, and can misbehave."""

    url: str = ""
    blobs: dict[str, bytes] = field(default_factory=dict)
    manifests: dict[str, bytes] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    ranges: list[str] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    """Asked before every answer, in order; the first answer counts."""

    @property
    def host(self) -> str:
        return self.url.removeprefix("http://")

    def name(self, repository: str, tag: str = "latest") -> str:
        return f"docker://{self.host}/{repository}:{tag}"

    def add(self, repository: str, *layers: bytes, tag: str = "latest") -> str:
        """Offer an image; return the reference."""
        for blob in (*layers, config()):
            self.blobs[digest_of(blob)] = blob
        data = manifest(layers, config())
        for selector in (tag, digest_of(data)):
            self.manifests[f"{repository}:{selector}"] = data
        return self.name(repository, tag)

    def fetched(self, blob: bytes) -> int:
        """How often a blob was asked for."""
        return sum(path.endswith(digest_of(blob)) for path in self.asked)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(request.path)
        for fault in self.faults:
            response = fault(request)
            if response is not None:
                return response
        repository, kind, selector = request.path.removeprefix("/v2/").rsplit("/", 2)
        if kind == "manifests":
            data = self.manifests.get(f"{repository}:{selector}")
            return web.Response(status=404) if data is None else web.Response(body=data, content_type=MANIFEST)
        data = self.blobs.get(selector)
        if data is None:
            return web.Response(status=404)
        wanted = request.headers.get("Range")
        if wanted is None:
            return web.Response(body=data)
        self.ranges.append(wanted)
        start = int(wanted.removeprefix("bytes=").rstrip("-"))
        headers = {"Content-Range": f"bytes {start}-{len(data) - 1}/{len(data)}"}
        return web.Response(status=206, body=data[start:], headers=headers)
