"""Building and pulling with Apptainer or Singularity through spython: the only place that knows that library.

spython has no timeouts and cannot be cancelled, so each call is made in a process of its own:
``python -m prorl_gym.sandbox.images.singularity build RECIPE TARGET``.
"""

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any, cast

from prorl_gym.errors import ConfigError
from prorl_gym.sandbox.images.commands import run_command
from prorl_gym.sandbox.images.helping import helper_environment

_MARK = "result: "


async def build_sif(recipe: Path, target: Path, *, seconds: float) -> None:
    """Build a SIF file from a definition file.

    Raises:
        ConfigError: it failed, took too long, or there is no Apptainer.
    """
    await _call(seconds, "build", str(recipe), str(target))


async def pull_sif(reference: str, target: Path, *, seconds: float) -> None:
    """Fetch a SIF file from where only Apptainer knows how (``library://``, ``oras://``, ``shub://``).

    Raises:
        ConfigError: as ``build_sif``.
    """
    await _call(seconds, "pull", reference, str(target))


async def labels_of(sif: Path, *, seconds: float = 60.0) -> dict[str, str]:
    """Return the labels that the builder of a SIF file gave it.

    Raises:
        ConfigError: as ``build_sif``.
    """
    return await _call(seconds, "inspect", str(sif))


async def _call(seconds: float, *arguments: str) -> Any:
    command = [sys.executable, "-P", "-m", "prorl_gym.sandbox.images.singularity", *arguments]
    # Apptainer wants a home; everything else of ours (tokens, APPTAINER_* settings) stays here.
    env = {**helper_environment(), "HOME": os.environ.get("HOME", "/")}
    text = await run_command(command, seconds=seconds, env=env)
    answer: Any = await asyncio.to_thread(json.loads, text.rpartition(_MARK)[2])
    if "error" in answer:
        raise ConfigError(f"{arguments[0]} of {arguments[1]} failed.", str(answer["error"])[-400:])
    return answer["done"]


def _run(op: str, *arguments: str) -> Any:
    """Make one call of spython. The library is untyped, and what it returns depends on what goes wrong."""
    from spython.main import Client  # pyright: ignore[reportMissingTypeStubs, reportUnknownVariableType]

    client = cast(Any, Client)
    match op, arguments:
        case "build", (recipe, target):
            result = client.build(recipe, target, sudo=False, force=True, quiet=True, return_result=True)
            if not os.path.exists(target):
                raise RuntimeError(_message(result))
            return None
        case "pull", (reference, target):
            folder, name = os.path.split(target)
            result = client.pull(image=reference, name=name, pull_folder=folder, force=True, quiet=True)
            if not os.path.exists(target):
                raise RuntimeError(_message(result))
            return None
        case "inspect", (sif,):
            found: Any = client.inspect(sif, quiet=True)
            labels: dict[Any, Any] = found["attributes"]["labels"]
            return {str(key): str(value) for key, value in labels.items()}
        case _:
            raise ValueError(f"no operation {op!r} with {len(arguments)} arguments")


def _message(result: Any) -> str:
    if isinstance(result, dict):
        result = cast(dict[str, Any], result).get("message", result)
    return " ".join(map(str, cast(list[Any], result))) if isinstance(result, list) else str(result)


def _main() -> None:
    try:
        answer = {"done": _run(*sys.argv[1:])}
    except (SystemExit, Exception) as error:  # spython exits where others raise
        answer = {"error": f"{type(error).__name__}: {error}"}
    print(f"\n{_MARK}{json.dumps(answer)}")


if __name__ == "__main__":
    _main()
