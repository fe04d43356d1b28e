"""Reading SWE rows: SWE-bench (Verified), SWE-Gym, R2E-Gym as they are published, and a strict format of our own.

The format is recognised by the fields. Files of the public collections carry many fields that nobody needs: unknown
ones are ignored there, and refused in ours. Facts about the formats were read in the data sets' cards and in the
harnesses that consume them.
"""

import base64
import binascii
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from prorl_gym.environments.rows import TaskRow, parse_row
from prorl_gym.environments.swe.controls.plan import ControlPlan
from prorl_gym.environments.swe.public_rows import is_public, read_public
from prorl_gym.environments.swe.task import Repository, SweTask, TestPlan

WORKDIR = "/testbed"
MAX_ARCHIVE = 64 << 20
"""Characters of base64: what is larger belongs into a file."""


def _inside(path: str) -> str:
    parts = path.split("/")
    if path.startswith("/") or "\0" in path or any(part in ("", ".", "..", ".git") for part in parts):
        raise ValueError("a path must be relative, inside the working directory, and not below .git")
    return path


def _base64(text: str) -> str:
    try:
        base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise ValueError("must be base64 of a tar.gz") from None
    return text


PathInside = Annotated[str, AfterValidator(_inside)]


class GenericTests(BaseModel):
    """Hidden tests of a generic row; see ``TestPlan``."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    files: dict[PathInside, str] = {}
    """Hidden tests: path below the working directory and text."""
    patch: str = ""
    """Unified diff of further hidden tests."""
    removed: tuple[PathInside, ...] = ()
    """Paths to remove before the run."""
    build: str = ""
    """Shell command before the tests."""
    command: str = Field(min_length=1)
    """Shell command that runs the tests."""
    parser: Literal["pytest", "unittest", "django", "tap", "go", "jest", "cargo"]
    """What reads its log."""
    fail_to_pass: Annotated[tuple[str, ...], Field(min_length=1)]
    """Tests that fail before the repair and must pass after it."""
    pass_to_pass: tuple[str, ...] = ()
    """Tests that must go on to pass."""
    seconds: Annotated[float, Field(gt=0, le=3600)] = 300.0
    """Wall clock for build and tests together."""
    controls: ControlPlan | None = None
    """Wrong versions of the tests, proven to fail on the gold patch; see ``ControlPlan``."""

    def as_plan(self) -> TestPlan:
        """Return the record that graders take."""
        return TestPlan(
            files=dict(self.files),
            patch=self.patch,
            removed=self.removed,
            build=self.build,
            command=self.command,
            parser=self.parser,
            fail_to_pass=self.fail_to_pass,
            pass_to_pass=self.pass_to_pass,
            seconds=self.seconds,
            controls=self.controls,
        )


class GenericSweRow(TaskRow):
    """Our own format: any repository, any runner that there is a parser for."""

    image: str = ""
    """Image of the sandboxes; the service's default when empty."""
    workdir: Annotated[str, Field(pattern=r"^(/[A-Za-z0-9_][A-Za-z0-9._-]*)+$")] = WORKDIR
    """Where the repository is, in the sandbox."""
    base_commit: Annotated[str, Field(pattern=r"^([0-9a-f]{7,64})?$")] = ""
    """Commit of the image's repository to begin at; the tree as it is found when empty."""
    archive: Annotated[str, AfterValidator(_base64), Field(max_length=MAX_ARCHIVE)] = ""
    """Base64 of a tar.gz whose root is the tree."""
    path: Annotated[str, Field(pattern=r"^(/.*)?$")] = ""
    """Absolute path of such a tar.gz on the service's host."""
    sha256: Annotated[str, Field(pattern=r"^([0-9a-f]{64})?$")] = ""
    """Of the file at ``path``."""
    tests: GenericTests
    """Hidden tests. They never leave the service's side before grading."""
    patch: str = ""
    """Gold patch: a unified diff that solves the row."""

    @model_validator(mode="after")
    def _one_repository(self) -> "GenericSweRow":
        if self.archive and self.path:
            raise ValueError("'archive' and 'path' exclude each other")
        if bool(self.path) != bool(self.sha256):
            raise ValueError("'path' and 'sha256' belong together")
        return self


def read_task(row: Mapping[str, Any]) -> SweTask:
    """Read a row of any known format.

    Raises:
        TaskError: ``BAD_ROW``, naming the row and the missing or wrong field.
    """
    if is_public(row):
        return read_public(row)
    generic = parse_row(GenericSweRow, "swe", row)
    return SweTask(
        id=generic.id,
        question=generic.question,
        image=generic.image,
        workdir=generic.workdir,
        base_commit=generic.base_commit,
        repository=Repository(generic.archive, generic.path, generic.sha256),
        tests=generic.tests.as_plan(),
        gold_patch=generic.patch,
        source="generic",
        raw=row,
        gold_steps=generic.gold_steps,
        wrong_steps=generic.wrong_steps,
    )
