"""Unpacks one layer, a tar archive or a SIF file, into a directory that overlayfs can use as a lower one.

The layer is hostile. All but ``is_sif`` runs in the helper, as the sandboxes' uid, and trusts nothing: paths are
resolved with the directory as root, owners, setuid bits and extended attributes are dropped, devices and fifos are left
out, sizes and counts are bounded. An archive may bring a link and then a file "below" it: resolved with the directory
as root (``openat2``), the link can only point into the directory, as it will when that is the root of a sandbox.

Deletions are translated from the archive's form (``.wh.NAME``, ``.wh..wh..opq``, see the OCI image layer
specification) to overlayfs's own (a 0/0 character device, the attribute ``user.overlay.opaque``), both of which an
unprivileged process may make.

The layout of a SIF is that of its specification, version 1: a header of fixed size, then descriptors without padding.
"""

import contextlib
import errno
import gzip
import hashlib
import io
import os
import shutil
import stat
import struct
import subprocess
import tarfile
import zlib
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, Any, Protocol, cast

from prorl_gym.errors import FailureKind, SandboxError
from prorl_gym.sandbox.syscalls import open_directory_in_root

_WHITEOUT = ".wh."
_OPAQUE = ".wh..wh..opq"
_RESERVED = ".wh..wh."  # bookkeeping of an old union file system
_MAX_COMPONENTS = 256
_CHUNK = 1 << 20
_KEPT_MODE = 0o1777
"""Permissions without setuid and setgid."""

_GZIP = b"\x1f\x8b"
_ZSTD = b"\x28\xb5\x2f\xfd"
_OVERHEAD_PER_ENTRY = 4096
"""Bytes of headers, padding and long names on top of the files themselves."""

# launch script, magic, version, architecture, id, created, modified, free and all descriptors, their offset and size
_HEADER = struct.Struct("<32s10s3s3s16sqqqqqq")
# data type, used, id, group, link, offset, size
_DESCRIPTOR = struct.Struct("<i?IIIqq")
_DESCRIPTOR_BYTES = 585
_EXTRA_OFFSET = _DESCRIPTOR_BYTES - 384
_MAGIC = b"SIF_MAGIC\0"
_PARTITION = 0x4004
_SQUASHFS, _PRIMARY = 1, 2
_MAX_DESCRIPTORS = 1024


class Readable(Protocol):
    def read(self, size: int = -1, /) -> bytes: ...


@dataclass(frozen=True, slots=True)
class LayerLimits:
    size: int
    """Bytes of files."""
    entries: int


@dataclass(slots=True)
class UnpackStats:
    size: int = 0
    entries: int = 0
    skipped: int = 0
    """Devices and fifos left out."""


def broken_layer(why: str) -> SandboxError:
    """Return the error of a layer that cannot be used; the caller adds the image's name."""
    return SandboxError(FailureKind.IMAGE_BROKEN, why, "Fetch it again; if it stays so, the image itself is bad.")


@contextmanager
def open_decompressed(file: io.BufferedReader, size: int, entries: int) -> Generator["HashingReader"]:
    """Open a layer, decompressed according to its first bytes: its media type is not trusted."""
    limit = size + entries * _OVERHEAD_PER_ENTRY
    start = file.peek(4)[:4]
    if start.startswith(_GZIP):
        with gzip.GzipFile(fileobj=file, mode="rb") as stream:
            yield HashingReader(stream, limit)
    elif start == _ZSTD:
        with _open_zstd(file) as stream:
            yield HashingReader(stream, limit)
    else:
        yield HashingReader(file, limit)


class HashingReader:
    """Hashes what is read from a stream, and yields at most ``limit`` bytes."""

    def __init__(self, source: Readable, limit: int) -> None:
        self._stream = source
        self._limit = limit
        self._digest = hashlib.sha256()
        self._bytes_read = 0

    @property
    def digest(self) -> str:
        """Digest of what has been read so far, as registries write it."""
        return f"sha256:{self._digest.hexdigest()}"

    def read(self, size: int = -1, /) -> bytes:
        """Read up to ``size`` bytes; ``IMAGE_BROKEN`` when the stream is damaged or too long."""
        try:
            data = self._stream.read(size)
        except (OSError, EOFError, zlib.error) as error:
            raise broken_layer(f"its compression is damaged ({error})") from None
        self._bytes_read += len(data)
        if self._bytes_read > self._limit:
            raise SandboxError(
                FailureKind.IMAGE_BROKEN,
                f"it decompresses to more than {self._limit} bytes",
                "If that is no attack, raise sandbox.images.layer_bytes.",
            )
        self._digest.update(data)
        return data

    def drain(self) -> None:
        """Read to the end: what follows the end mark counts for its digest."""
        while self.read(1 << 20):
            pass


@contextmanager
def _open_zstd(file: io.BufferedReader) -> Generator[IO[bytes]]:
    """Decompress through the ``zstd`` program: the standard library reads zstd only from Python 3.14 on."""
    program = shutil.which("zstd")
    if program is None:
        raise SandboxError(
            FailureKind.SANDBOX_UNAVAILABLE, "the layer is compressed with zstd, which is not installed.",
            "Install the package zstd.",
        )  # fmt: skip
    # The peek at the first bytes has filled the buffer: the program reads the file from its start again.
    file.seek(0)
    with subprocess.Popen(
        [program, "-dcq", "--memory=512MB"], stdin=file.fileno(), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        assert process.stdout is not None
        try:
            yield process.stdout
        finally:
            process.stdout.close()
            if process.wait() not in (0, -13):
                raise broken_layer("its compression is damaged (zstd)")


def unpack_tar(archive: Readable, target: str, limits: LayerLimits) -> UnpackStats:
    """Unpack an uncompressed tar stream into the empty directory ``target``.

    Raises ``SandboxError`` (IMAGE_BROKEN) when the archive is damaged, leads outside, or exceeds the bounds, and
    ``OSError`` when the disk is full or cannot hold what overlayfs needs.
    """
    root = os.open(target, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    done = UnpackStats()
    try:
        with tarfile.open(fileobj=cast(Any, archive), mode="r|") as entries:
            for entry in entries:
                done.entries += 1
                # Counted by the header, before anything is written; a stream cannot bring more than that.
                done.size += entry.size if entry.isreg() else 0
                if done.size > limits.size or done.entries > limits.entries:
                    raise SandboxError(
                        FailureKind.IMAGE_BROKEN,
                        f"it unpacks to more than {limits.size} bytes or {limits.entries} entries",
                        "If that is no attack, raise sandbox.images.layer_bytes or sandbox.images.layer_entries.",
                    )
                cast(Any, entries).members = []  # would grow with every entry
                _EntryWriter(root, entries, entry, done).write_entry()
    except (tarfile.TarError, EOFError, MemoryError, RecursionError, UnicodeError, ValueError) as error:
        raise broken_layer(f"the archive is damaged ({type(error).__name__}: {error})") from None
    finally:
        os.close(root)
    return done


def _normalize_path(name: str) -> str:
    """Return a name relative to the root without empty and dot components."""
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if ".." in parts or len(parts) > _MAX_COMPONENTS or "\0" in name:
        raise broken_layer(f"it has an entry that leads outside or too deep ({name[:80]!r})")
    return "/".join(parts)


@dataclass(frozen=True, slots=True)
class _EntryWriter:
    root: int
    archive: tarfile.TarFile
    entry: tarfile.TarInfo
    stats: UnpackStats

    def write_entry(self) -> None:
        entry = self.entry
        path = _normalize_path(entry.name)
        if not path:
            return  # the root itself
        above, name = os.path.split(path)
        with self._open_parent(above) as parent:
            if name == _OPAQUE:
                _hide_lower(parent, ".")
            elif name.startswith(_RESERVED):
                return
            elif name.startswith(_WHITEOUT):
                self._white_out(parent, name.removeprefix(_WHITEOUT))
            elif entry.isdir():
                self._make_directory(parent, name)
            elif entry.isreg():
                _remove_existing(parent, name)
                self._write_file(parent, name)
            elif entry.issym():
                _remove_existing(parent, name)
                os.symlink(entry.linkname, name, dir_fd=parent)
            elif entry.islnk():
                self._hard_link(parent, name)
            else:
                self.stats.skipped += 1

    @contextmanager
    def _open_parent(self, path: str) -> Generator[int]:
        try:
            descriptor = _make_directories(self.root, path, self.stats)
        except OSError as error:
            if error.errno in (errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG):
                raise broken_layer(f"{self.entry.name[:80]!r} lies below something that is no directory") from None
            raise
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    def _make_directory(self, parent: int, name: str) -> None:
        try:
            os.mkdir(name, dir_fd=parent)
        except FileExistsError:
            if not stat.S_ISDIR(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode):
                _replace_by_directory(parent, name)
        # Without 0700 the store could not remove the tree; inside a sandbox, root may enter it anyway.
        descriptor = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
        try:
            os.fchmod(descriptor, self.entry.mode & _KEPT_MODE | 0o700)
        finally:
            os.close(descriptor)

    def _write_file(self, parent: int, name: str) -> None:
        source = self.archive.extractfile(self.entry)
        assert source is not None  # it is a regular file
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with os.fdopen(os.open(name, flags, 0o600, dir_fd=parent), "wb") as file:
            shutil.copyfileobj(source, file, _CHUNK)
            file.flush()
            os.fchmod(file.fileno(), self.entry.mode & _KEPT_MODE | 0o400)
            with contextlib.suppress(OverflowError, OSError):  # a date that the file system cannot hold
                os.utime(file.fileno(), (self.entry.mtime, self.entry.mtime))

    def _hard_link(self, parent: int, name: str) -> None:
        above, source = os.path.split(_normalize_path(self.entry.linkname))
        try:
            holder = open_directory_in_root(self.root, above)
        except OSError:
            raise self._link_error() from None
        try:
            found = os.stat(source, dir_fd=holder, follow_symlinks=False)
            if stat.S_ISDIR(found.st_mode):
                raise self._link_error()
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(found, os.stat(name, dir_fd=parent, follow_symlinks=False)):
                    return
            _remove_existing(parent, name)
            os.link(source, name, src_dir_fd=holder, dst_dir_fd=parent, follow_symlinks=False)
        except FileNotFoundError:
            raise self._link_error() from None
        finally:
            os.close(holder)

    def _link_error(self) -> SandboxError:
        return broken_layer(
            f"{self.entry.name[:80]!r} is a link to {self.entry.linkname[:80]!r}, which is no file of it"
        )

    def _white_out(self, parent: int, name: str) -> None:
        if name in ("", ".", ".."):
            raise broken_layer(f"it deletes {name!r}")
        try:
            found = os.stat(name, dir_fd=parent, follow_symlinks=False)
        except FileNotFoundError:
            os.mknod(name, stat.S_IFCHR, os.makedev(0, 0), dir_fd=parent)
        else:  # what this layer has there stays, wherever the deletion stands in the archive
            if stat.S_ISDIR(found.st_mode):
                _hide_lower(parent, name)


def _hide_lower(parent: int, name: str) -> None:
    """Hide what lower layers have in a directory."""
    descriptor = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
    try:
        os.setxattr(descriptor, "user.overlay.opaque", b"y")
    finally:
        os.close(descriptor)


def _replace_by_directory(parent: int, name: str) -> None:
    """Make a directory in place of a file or deletion of this layer, either of which hid what is below."""
    _remove_existing(parent, name)
    os.mkdir(name, 0o755, dir_fd=parent)
    _hide_lower(parent, name)


def _make_directories(root: int, path: str, made: UnpackStats) -> int:
    """Open a directory below ``root``, making what is missing; ``ENOTDIR`` when something else is in the way."""
    try:
        return open_directory_in_root(root, path)
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR):
            raise
    above, name = os.path.split(path)
    parent = _make_directories(root, above, made)
    try:
        os.mkdir(name, 0o755, dir_fd=parent)
        made.entries += 1
    except FileExistsError:
        if not stat.S_ISCHR(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode):
            raise NotADirectoryError(errno.ENOTDIR, "a file or dangling link is in the way", path) from None
        _replace_by_directory(parent, name)
    finally:
        os.close(parent)
    return open_directory_in_root(root, path)


def _remove_existing(parent: int, name: str) -> None:
    """Remove what an earlier entry of the same layer wrote: the later one wins."""
    try:
        os.unlink(name, dir_fd=parent)
    except FileNotFoundError:
        return
    except IsADirectoryError:
        shutil.rmtree(name, dir_fd=parent)


def is_sif(file: IO[bytes]) -> bool:
    file.seek(0)
    return file.read(42)[32:] == _MAGIC


def _partition_offset(file: IO[bytes]) -> int:
    """Return where the squashfs of the system partition begins, in bytes."""
    file.seek(0)
    header = file.read(_HEADER.size)
    if len(header) < _HEADER.size:
        raise broken_layer("it is cut short")
    *_, total, offset, _ = _HEADER.unpack(header)
    file.seek(offset)
    for _ in range(min(total, _MAX_DESCRIPTORS)):
        data = file.read(_DESCRIPTOR_BYTES)
        if len(data) < _DESCRIPTOR_BYTES:
            break
        kind, used, _, _, _, start, _ = _DESCRIPTOR.unpack_from(data)
        file_system, role = struct.unpack_from("<ii", data, _EXTRA_OFFSET)
        if used and kind == _PARTITION and (file_system, role) == (_SQUASHFS, _PRIMARY):
            return start
    raise broken_layer("it holds no plain squashfs of a system (encrypted and ext3 images are not supported)")


def unpack_sif(path: str, target: str, bounds: LayerLimits) -> UnpackStats:
    """Unpack a SIF into the directory ``target`` as the calling user, who must not be root.

    Raises ``SandboxError``: ``IMAGE_BROKEN`` also when it is empty or exceeds the bounds, ``SANDBOX_UNAVAILABLE`` when
    ``unsquashfs`` is missing.
    """
    program = shutil.which("unsquashfs")
    if program is None:
        raise SandboxError(
            FailureKind.SANDBOX_UNAVAILABLE, "SIF files are unpacked by unsquashfs, which is not installed.",
            "Install the package squashfs-tools.",
        )  # fmt: skip
    with open(path, "rb") as file:
        offset = _partition_offset(file)
    # An ordinary user cannot make devices: -no-exit-code keeps that from being a failure.
    command = [program, "-quiet", "-no-progress", "-no-xattrs", "-no-exit-code", "-processors", "2", "-force"]
    ran = subprocess.run(
        [*command, "-dest", target, "-offset", str(offset), path],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        check=False,
    )
    if ran.returncode:
        lines = ran.stderr.decode(errors="replace").strip().splitlines() or ["no reason given"]
        raise broken_layer(f"unsquashfs failed: {lines[-1][:200]}")
    done = UnpackStats()
    _sanitize_directory(target, done)
    if not done.entries or done.size > bounds.size or done.entries > bounds.entries:
        raise SandboxError(
            FailureKind.IMAGE_BROKEN,
            f"it unpacks to {done.size} bytes in {done.entries} entries",
            f"1 to {bounds.entries} entries and at most {bounds.size} bytes are accepted (sandbox.images.layer_bytes).",
        )
    return done


def _sanitize_directory(path: str, done: UnpackStats) -> None:
    """Drop setuid bits, make directories accessible to their owner, remove devices; count what is left."""
    with os.scandir(path) as entries:
        for entry in entries:
            found = entry.stat(follow_symlinks=False)
            done.entries += 1
            if stat.S_ISLNK(found.st_mode):
                continue
            if stat.S_ISDIR(found.st_mode):
                os.chmod(entry.path, found.st_mode & 0o1777 | 0o700)
                _sanitize_directory(entry.path, done)
            elif stat.S_ISREG(found.st_mode):
                os.chmod(entry.path, found.st_mode & 0o1777 | 0o400)
                done.size += found.st_size
            else:
                os.unlink(entry.path)
                done.skipped += 1
