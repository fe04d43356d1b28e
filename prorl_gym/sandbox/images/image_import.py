"""Makes named images of directories, SIF files and archives, and of what Apptainer builds or pulls.

Only this module uses spython, through which Apptainer or Singularity is called. It has no timeouts and cannot be
cancelled, so each call is made in a process of its own: ``python -m prorl_gym.sandbox.images.image_import build RECIPE
TARGET``. The last line of its output is the result.
"""

import asyncio
import contextlib
import json
import os
import re
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

from prorl_gym.errors import ConfigError
from prorl_gym.sandbox.cancellation import run_shielded
from prorl_gym.sandbox.images.layers import UnfinishedLayer, helper_environment
from prorl_gym.sandbox.images.store import ImageRecord, ImageStore, file_digest, file_stamp
from prorl_gym.sandbox.images.unpack import is_sif

APPTAINER_SCHEMES = ("library://", "oras://", "shub://")
"""References that only Apptainer can pull."""

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,127}")
_RESERVED_NAMES = frozenset({"host"})
_ERROR_CHARACTERS = 400
_RESULT_PREFIX = "result: "
_MODULE = "prorl_gym.sandbox.images.image_import"


async def import_image(
    store: ImageStore, source: Path, name: str, *, base: str = "", tar_options: Sequence[str] = ()
) -> ImageRecord:
    """Make an image of a directory, a SIF file or a tar archive. It is kept until it is removed by name.

    ``base`` is the image below it: ``source`` is then a thin layer on top, its deletions written as ``.wh.NAME``.
    ``tar_options`` apply to a directory. Raises ``ConfigError`` for a name that cannot be used, ``SandboxError`` for
    such a source.
    """
    _check_name(name)
    below = (await store.ensure_image(base)).layers if base else ()
    match await asyncio.to_thread(_kind_of, source):
        case "directory":

            async def copy(layer: UnfinishedLayer) -> str:
                return await store.layers.copy_directory(source, layer, tar_options)

            digest = (await store.layers.create_layer(name, copy)).key.replace("-", ":")
        case "sif":
            digest = await store.ensure_sif_layer(source)
        case "archive":
            digest = await asyncio.to_thread(file_digest, source)
            unpack = partial(store.layers.unpack_archive, source, digest)
            await store.layers.ensure_layer(digest, unpack)
    record = ImageRecord(reference=name, kind="local", digest=digest, layers=(*below, digest))
    store.records.write_record(record)
    return record


async def build_definition(store: ImageStore, definition: Path, name: str, *, seconds: float) -> ImageRecord:
    """Build an image from a definition file with Apptainer.

    Raises ``ConfigError`` when Apptainer is missing or failed, or for a name that cannot be used; ``SandboxError`` when
    there is no such file or the result is no image.
    """
    file_stamp(definition)
    return await _import_from_apptainer(store, name, "build", str(definition.absolute()), seconds)  # noqa: ASYNC240 - no disk access


async def pull_with_apptainer(store: ImageStore, reference: str, name: str, *, seconds: float) -> ImageRecord:
    """Pull an image through Apptainer. Raises as ``build_definition``."""
    return await _import_from_apptainer(store, name, "pull", reference, seconds)


def _check_name(name: str) -> None:
    if not _NAME.fullmatch(name) or name in _RESERVED_NAMES:
        raise ConfigError(
            f"--name {name!r} cannot be the name of an image.",
            "Use lower-case letters, digits, dots, dashes and underscores; 'host' is taken.",
        )


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
    # Next to the store, which has the room; open to the sandboxes' uid, which unpacks it.
    with tempfile.TemporaryDirectory(dir=store.layers.directory, prefix=".making-") as work:
        os.chmod(work, 0o755)
        sif = Path(work, "image.sif")
        command = [sys.executable, "-P", "-m", _MODULE, op, source, str(sif)]
        # Apptainer needs HOME; everything else in this environment (tokens, APPTAINER_* settings) is withheld.
        env = {**helper_environment(), "HOME": os.environ.get("HOME", "/")}
        text = await run_command(command, seconds=seconds, env=env)
        answer: dict[str, Any] = json.loads(text.rpartition(_RESULT_PREFIX)[2])
        if "error" in answer:
            raise ConfigError(f"{op} of {source} failed.", str(answer["error"])[-_ERROR_CHARACTERS:])
        os.chmod(sif, 0o644)
        return await import_image(store, sif, name)


async def run_command(
    command: Sequence[str],
    *,
    seconds: float,
    env: Mapping[str, str] | None = None,
    allowed_exit_codes: Sequence[int] = (0,),
) -> str:
    """Run a program in a process group of its own and return its output. Cancelling kills the group.

    ``env`` replaces this process's environment. Raises ``ConfigError`` when it is not installed, failed, or took longer
    than ``seconds``.
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


def _make_sif(op: str, source: str, target: str) -> None:
    """Make one call of spython. The library is untyped, and what it returns depends on what goes wrong."""
    from spython.main import Client  # pyright: ignore[reportMissingTypeStubs, reportUnknownVariableType]

    client = cast(Any, Client)
    if op == "build":
        result = client.build(source, target, sudo=False, force=True, quiet=True, return_result=True)
    else:
        folder, name = os.path.split(target)
        result = client.pull(image=source, name=name, pull_folder=folder, force=True, quiet=True)
    if not os.path.exists(target):
        if isinstance(result, dict):
            result = cast(dict[str, Any], result).get("message", result)
        raise RuntimeError(" ".join(map(str, cast(list[Any], result))) if isinstance(result, list) else str(result))


if __name__ == "__main__":
    answer: dict[str, str] = {}
    try:
        _make_sif(*sys.argv[1:])
    except (SystemExit, Exception) as error:  # spython exits where others raise
        answer = {"error": f"{type(error).__name__}: {error}"}
    print(f"\n{_RESULT_PREFIX}{json.dumps(answer)}")
