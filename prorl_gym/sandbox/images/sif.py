"""SIF files: finds the file system inside, from the header, and unpacks it.

The layout is that of the SIF specification, version 1: a header of fixed size, then descriptors without padding.
"""

import os
import shutil
import stat
import struct
import subprocess
from typing import IO

from prorl_gym.errors import FailureKind, SandboxError
from prorl_gym.sandbox.images.untar import LayerLimits, UnpackStats, broken_layer

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


def is_sif(file: IO[bytes]) -> bool:
    """Whether a file is a SIF, by its first bytes."""
    file.seek(0)
    return file.read(42)[32:] == _MAGIC


def _partition_offset(file: IO[bytes]) -> int:
    """Return where the squashfs of the system partition begins, in bytes.

    Raises:
        SandboxError: ``IMAGE_BROKEN``, there is none (it is encrypted or an ext3 image).
    """
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

    Raises:
        SandboxError: ``IMAGE_BROKEN``; ``SANDBOX_UNAVAILABLE`` when ``unsquashfs`` is missing.
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
    return _sanitize_tree(target, bounds)


def _sanitize_tree(target: str, bounds: LayerLimits) -> UnpackStats:
    """Drop setuid bits, make directories accessible to their owner, remove devices; return the size.

    Raises:
        SandboxError: ``IMAGE_BROKEN``, it is empty or larger than the bounds.
    """
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
