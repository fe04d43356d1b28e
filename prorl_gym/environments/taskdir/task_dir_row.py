"""Rows of the ``taskdir`` environment: a whole task directory in one JSON object."""

import base64
import binascii
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, PlainSerializer

from prorl_gym.environments.row_format import StrictModel, TaskRow

MAX_FILES = 2000
MAX_BYTES = 32 << 20
"""Bounds of the files of one row, all together."""


def _decode_base64(value: object) -> bytes:
    if isinstance(value, bytes):
        return value
    if not isinstance(value, str):
        raise ValueError("expected base64 text")
    try:
        return base64.b64decode(value, validate=True)
    except binascii.Error:
        raise ValueError("this is no base64") from None


Base64 = Annotated[
    bytes, BeforeValidator(_decode_base64), PlainSerializer(lambda data: base64.b64encode(data).decode())
]
AbsolutePath = Annotated[str, Field(pattern=r"^/[^\x00]*$", max_length=4096)]


class TaskFile(StrictModel):
    """A file and where it goes in the sandbox."""

    kind: Literal["file"] = "file"
    path: AbsolutePath
    data: Base64
    executable: bool = False


class SetupRun(StrictModel):
    """A command that prepares the sandbox before the agent starts. There is no network."""

    kind: Literal["run"] = "run"
    command: Annotated[str, Field(min_length=1)]
    cwd: AbsolutePath = "/"


SetupStep = Annotated[TaskFile | SetupRun, Field(discriminator="kind")]


class Verifier(StrictModel):
    """Grades the end state. Its files enter a sandbox only after the agent has stopped."""

    files: Annotated[tuple[TaskFile, ...], Field(min_length=1, max_length=MAX_FILES)]
    command: Annotated[str, Field(min_length=1)]
    """For bash, in the working directory."""
    reward: Literal["file", "pytest", "exit"]
    """Source of the reward. ``file``: /logs/verifier/reward.json or reward.txt. ``pytest``: 1.0 when the short summary
    (``-rA``) names tests that passed and none that did not. ``exit``: 1.0 for exit code 0."""
    env: dict[str, str] = Field(default={})
    seconds: Annotated[float, Field(gt=0, le=7200)] = 120.0


class Solution(StrictModel):
    """The reference solution; played by ``validate`` and the oracle only."""

    files: Annotated[tuple[TaskFile, ...], Field(max_length=MAX_FILES)] = ()
    command: Annotated[str, Field(min_length=1)]


class TaskDirRow(TaskRow):
    """A task. ``question`` is its instruction."""

    image: str = ""
    """Image of the sandbox; the service's own by default."""
    workdir: AbsolutePath = "/app"
    env: dict[str, str] = Field(default={})
    memory: Annotated[int, Field(ge=64 << 20)] | None = None
    """Bytes that all processes together may use; the service's bound by default."""
    setup: Annotated[tuple[SetupStep, ...], Field(max_length=MAX_FILES)] = ()
    """Files and commands that make the starting state, in order."""
    verifier: Verifier
    keep: tuple[AbsolutePath, ...] = ()
    """When given: the verifier runs in a clean sandbox, into which only these files and directories of the agent's end
    state are taken. Otherwise it runs in the agent's own sandbox."""
    solution: Solution | None = None
