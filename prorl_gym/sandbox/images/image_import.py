"""Makes named images of directories, SIF files and archives, and of what Apptainer builds or pulls."""

import asyncio
import contextlib
import json
import os
import re
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from prorl_gym.errors import ConfigError
from prorl_gym.sandbox.cancellation import run_shielded
from prorl_gym.sandbox.images import spython_wrapper
from prorl_gym.sandbox.images.sif import is_sif
from prorl_gym.sandbox.images.store import ImageRecord, ImageStore, file_digest, file_stamp
from prorl_gym.sandbox.images.unpack_client import UnfinishedLayer, helper_environment

APPTAINER_SCHEMES = ("library://", "oras://", "shub://")
"""References that only Apptainer can pull."""

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,127}")
_RESERVED_NAMES = frozenset({"host"})
_ERROR_CHARACTERS = 400


async def import_image(
    store: ImageStore, source: Path, name: str, *, base: str = "", tar_options: Sequence[str] = ()
) -> ImageRecord:
    """Make an image of a file or directory. It is kept until it is removed by name.

    Args:
        store: where to.
        source: a directory, a SIF file, or a tar archive.
        name: replaces the image that had this name.
        base: image below it: ``source`` is then a thin layer on top, its deletions written as ``.wh.NAME``.
        tar_options: more options of ``tar`` when the source is a directory.

    Raises:
        ConfigError: the name cannot be used.
        SandboxError: the source cannot be used.
    """
    _check_name(name)
    below = (await store.ensure_image(base)).layers if base else ()
    digest = await _import_layer(store, source, name, tar_options)
    record = ImageRecord(reference=name, kind="local", digest=digest, layers=(*below, digest))
    store.records.write_record(record)
    return record


async def build_definition(store: ImageStore, definition: Path, name: str, *, seconds: float) -> ImageRecord:
    """Build an image from a definition file with Apptainer.

    Raises:
        ConfigError: Apptainer is missing or failed, or the name cannot be used.
        SandboxError: there is no such file, or the result is no image.
    """
    file_stamp(definition)
    return await _import_from_apptainer(store, name, "build", str(definition.absolute()), seconds)  # noqa: ASYNC240 - no disk access


async def pull_with_apptainer(store: ImageStore, reference: str, name: str, *, seconds: float) -> ImageRecord:
    """Pull an image through Apptainer.

    Raises:
        ConfigError: Apptainer is missing or failed, or the name cannot be used.
        SandboxError: the result is no image.
    """
    return await _import_from_apptainer(store, name, "pull", reference, seconds)


def _check_name(name: str) -> None:
    if not _NAME.fullmatch(name) or name in _RESERVED_NAMES:
        raise ConfigError(
            f"--name {name!r} cannot be the name of an image.",
            "Use lower-case letters, digits, dots, dashes and underscores; 'host' is taken.",
        )


async def _import_layer(store: ImageStore, source: Path, name: str, options: Sequence[str]) -> str:
    kind = await asyncio.to_thread(_kind_of, source)
    if kind == "directory":

        async def copy(layer: UnfinishedLayer) -> str:
            return await store.unpacker.copy_directory(source, layer, options)

        return (await store.layers.create_layer(name, copy)).key.replace("-", ":")
    if kind == "sif":
        return await store.ensure_sif_layer(source)
    digest = await asyncio.to_thread(file_digest, source)
    await store.layers.ensure_layer(digest, lambda layer: store.unpacker.unpack_archive(source, digest, layer))
    return digest


def _kind_of(source: Path) -> Literal["directory", "sif", "archive"]:
    file_stamp(source)  # raises where there is nothing
    if source.is_dir():
        return "directory"
    with source.open("rb") as file:
        return "sif" if is_sif(file) else "archive"


async def _import_from_apptainer(
    store: ImageStore, name: str, op: Literal["build", "pull"], source: str, seconds: float
) -> ImageRecord:
    """Have Apptainer make a SIF file of ``source``, then import it."""
    _check_name(name)
    store.layers.make_directories()
    # Beside the store, which has the room; open to the sandboxes' uid, which unpacks it.
    with tempfile.TemporaryDirectory(dir=store.layers.directory, prefix=".making-") as work:
        os.chmod(work, 0o755)
        sif = Path(work, "image.sif")
        await _run_apptainer(op, source, str(sif), seconds=seconds)
        os.chmod(sif, 0o644)
        return await import_image(store, sif, name)


async def _run_apptainer(op: str, source: str, target: str, *, seconds: float) -> None:
    command = [sys.executable, "-P", "-m", spython_wrapper.__name__, op, source, target]
    # Apptainer needs HOME; everything else in this environment (tokens, APPTAINER_* settings) is withheld.
    env = {**helper_environment(), "HOME": os.environ.get("HOME", "/")}
    text = await run_command(command, seconds=seconds, env=env)
    answer: dict[str, Any] = json.loads(text.rpartition(spython_wrapper.RESULT_PREFIX)[2])
    if "error" in answer:
        raise ConfigError(f"{op} of {source} failed.", str(answer["error"])[-_ERROR_CHARACTERS:])


async def run_command(
    command: Sequence[str],
    *,
    seconds: float,
    env: Mapping[str, str] | None = None,
    allowed_exit_codes: Sequence[int] = (0,),
) -> str:
    """Run a program in a process group of its own and return its output. Cancelling kills the group.

    Args:
        command: program and arguments.
        seconds: time after which it is killed.
        env: its environment; this process's own by default.
        allowed_exit_codes: exit codes that are no failure.

    Raises:
        ConfigError: it is not installed, failed, or took too long.
    """
    name = os.path.basename(command[0])
    try:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=env,
            start_new_session=True,
        )
    except FileNotFoundError:
        raise ConfigError(f"{name} is not installed.", "Install it; .ci/image-tools names the packages.") from None
    try:
        async with asyncio.timeout(seconds):
            output, _ = await process.communicate()
    except TimeoutError:
        raise ConfigError(f"{name} was not done after {seconds:.0f} s.", "Is a registry it needs slow?") from None
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await run_shielded(process.wait())
    text = output.decode(errors="replace")
    if process.returncode not in allowed_exit_codes:
        raise ConfigError(f"{name} failed (exit {process.returncode}).", text.strip()[-_ERROR_CHARACTERS:])
    return text
