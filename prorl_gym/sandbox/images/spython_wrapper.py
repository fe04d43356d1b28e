"""Builds and pulls SIF files with Apptainer or Singularity through spython: the only module that uses that library.

spython has no timeouts and cannot be cancelled, so each call is made in a process of its own:
``python -m prorl_gym.sandbox.images.spython_wrapper build RECIPE TARGET``. The last line of its output is the result.
"""

import json
import os
import sys
from typing import Any, cast

RESULT_PREFIX = "result: "


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
        raise RuntimeError(_message(result))


def _message(result: Any) -> str:
    if isinstance(result, dict):
        result = cast(dict[str, Any], result).get("message", result)
    return " ".join(map(str, cast(list[Any], result))) if isinstance(result, list) else str(result)


def _main() -> None:
    answer: dict[str, str] = {}
    try:
        _make_sif(*sys.argv[1:])
    except (SystemExit, Exception) as error:  # spython exits where others raise
        answer = {"error": f"{type(error).__name__}: {error}"}
    print(f"\n{RESULT_PREFIX}{json.dumps(answer)}")


if __name__ == "__main__":
    _main()
