"""SWE rows: SWE-bench (Verified), SWE-Gym and R2E-Gym as published, and a strict format of our own.

``parse_swe_row`` detects the format by its fields and reads each into ``SweTask``. Unknown fields are ignored in public
rows, which have many, and refused in ours. Sources for the public formats: the cards of the data sets and the harnesses
that read them.
"""

import base64
import binascii
import difflib
import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeVar, cast

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from prorl_gym.config import config_error_of
from prorl_gym.environments.swe.controls.control_plan import ControlPlan
from prorl_gym.environments.task_row import RowStep, TaskRow, parse_row
from prorl_gym.errors import FailureKind, TaskError
from prorl_gym.sandbox.images.dataset_images import TEMPLATES
from prorl_gym.sandbox.images.registry.oci_format import DOCKER_SCHEME

Source = Literal["swebench", "swegym", "r2egym", "generic"]
ParserName = Literal["pytest", "unittest", "django", "tap", "go", "jest", "cargo", "swebench"]

WORKDIR = "/testbed"
_MAX_ARCHIVE = 64 << 20
"""Characters of base64; a larger archive has to be a file."""

_PUBLIC_SECONDS = 1800.0
"""Time limit for the tests of a public row, as in the harness of SWE-bench."""

# The repositories of SWE-Gym are not in SWE-bench; its rows look the same otherwise.
_SWE_GYM = frozenset(
    "bokeh/bokeh conan-io/conan dask/dask facebookresearch/hydra getmoto/moto iterative/dvc modin-project/modin "
    "pandas-dev/pandas project-monai/monai pydantic/pydantic python/mypy".split()
)

R2E_TESTS = "r2e_tests"
HIDDEN_FROM_AGENT = {
    "r2egym": (
        "run_tests.sh", R2E_TESTS, "syn_issue.json", "expected_test_output.json", "execution_result.json",
        "parsed_commit.json", "modified_files.json", "modified_entities.json",
    ),
}  # fmt: skip
"""Files for graders in the working directory of a data set's images, by source."""
HIDDEN_OUTSIDE_WORKDIR = {"r2egym": ("/r2e_tests",)}
"""Files for graders elsewhere in a data set's images, by source."""
SET_ASIDE_DIRECTORY = "/var/lib/prorl-swe"
"""Directory to which a grading sandbox moves the files of ``HIDDEN_FROM_AGENT``."""

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True, slots=True)
class Repository:
    """Where the code under repair comes from: one of the two, or the image when neither is set."""

    archive: str = ""
    """Base64 of a tar.gz whose root is the tree: for small repositories."""
    path: str = ""
    """A tar.gz on the service's host (absolute), checked against ``sha256``."""
    sha256: str = ""


@dataclass(frozen=True, slots=True)
class TestPlan:
    """How a repair is graded. Nothing of it may enter the agent's sandbox or the prompt."""

    command: str
    """Shell command that runs the tests."""
    parser: ParserName
    fail_to_pass: tuple[str, ...]
    """Tests that must pass now. Of an R2E-Gym row: all that must, named without their file (``Class.test``)."""
    seconds: float
    """Wall clock for build and tests together."""
    files: Mapping[str, str] = field(default_factory=dict[str, str])
    """Hidden tests: path below the working directory -> text. Written before the run, in the clean sandbox only."""
    patch: str = ""
    """Unified diff of further hidden tests, applied after ``files``."""
    removed: tuple[str, ...] = ()
    """Paths that are removed before the run, for example the versions that the agent could see."""
    build: str = ""
    """Shell command before the tests. When it fails the tests do not run: not solved."""
    pass_to_pass: tuple[str, ...] = ()
    """Tests that passed before and still must."""
    controls: ControlPlan | None = None
    """Controls proven when the row was made; ``None`` when none were searched for."""

    __test__ = False


@dataclass(frozen=True, slots=True)
class SweTask:
    """One repository to repair."""

    id: str
    question: str
    """Problem statement; part of the prompt, verbatim."""
    image: str
    """Image of both sandboxes; ``""`` is the service's default."""
    workdir: str
    """Absolute path of the repository in the sandbox."""
    base_commit: str
    """Commit of the image's repository to begin at; ``""``: the tree as it is found."""
    repository: Repository
    tests: TestPlan
    gold_patch: str
    """Enters only the clean sandbox, and only when gold is graded."""
    source: Source
    raw: Mapping[str, Any]
    """The row as submitted, for the harness of SWE-bench."""
    gold_steps: tuple[RowStep, ...] = ()
    wrong_steps: tuple[RowStep, ...] = ()


def _check_path_inside(path: str) -> str:
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


PathInside = Annotated[str, AfterValidator(_check_path_inside)]


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


class GenericSweRow(TaskRow):
    """Our own format: any repository, any runner with a parser."""

    image: str = ""
    """Image of the sandboxes; the service's default when empty."""
    workdir: Annotated[str, Field(pattern=r"^(/[A-Za-z0-9_][A-Za-z0-9._-]*)+$")] = WORKDIR
    """Where the repository is, in the sandbox."""
    base_commit: Annotated[str, Field(pattern=r"^([0-9a-f]{7,64})?$")] = ""
    """Commit of the image's repository to begin at; the tree as it is found when empty."""
    archive: Annotated[str, AfterValidator(_base64), Field(max_length=_MAX_ARCHIVE)] = ""
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


def parse_swe_row(row: Mapping[str, Any]) -> SweTask:
    """Read a row of any known format.

    Raises:
        TaskError: ``BAD_ROW``, naming the row and the missing or wrong field.
    """
    if _is_public_row(row):
        return _parse_public_row(row)
    generic = parse_row(GenericSweRow, "swe", row)
    return SweTask(
        id=generic.id,
        question=generic.question,
        image=generic.image,
        workdir=generic.workdir,
        base_commit=generic.base_commit,
        repository=Repository(generic.archive, generic.path, generic.sha256),
        tests=TestPlan(**dict(generic.tests)),
        gold_patch=generic.patch,
        source="generic",
        raw=row,
        gold_steps=generic.gold_steps,
        wrong_steps=generic.wrong_steps,
    )


class _PublicRow(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)

    problem_statement: str = Field(min_length=1)


class _SweBenchRow(_PublicRow):
    instance_id: str = Field(min_length=1)
    repo: str = Field(min_length=1)
    base_commit: str = Field(pattern=r"^[0-9a-f]{7,64}$")
    patch: str
    test_patch: str
    version: str | None = None
    environment_setup_commit: str | None = None
    FAIL_TO_PASS: tuple[str, ...] = Field(min_length=1)
    PASS_TO_PASS: tuple[str, ...]

    @field_validator("FAIL_TO_PASS", "PASS_TO_PASS", mode="before")
    @classmethod
    def _list(cls, value: object) -> object:
        return _from_json(value)

    @property
    def source(self) -> Source:
        foreign = self.repo.lower() in _SWE_GYM or self.version is None
        return "swegym" if foreign and self.environment_setup_commit is None else "swebench"


class _R2eFiles(BaseModel):
    model_config = ConfigDict(extra="ignore")

    test_file_names: tuple[str, ...] = ()
    test_file_codes: tuple[str, ...] = ()


class _R2eGymRow(_PublicRow):
    docker_image: str = Field(min_length=1)
    repo_name: str = Field(min_length=1)
    commit_hash: str = Field(pattern=r"^[0-9a-f]{7,64}$")
    parsed_commit_content: dict[str, Any]
    execution_result_content: _R2eFiles
    expected_output_json: dict[str, str] = Field(min_length=1)

    @field_validator("parsed_commit_content", "execution_result_content", "expected_output_json", mode="before")
    @classmethod
    def _object(cls, value: object) -> object:
        return _from_json(value)


Model = TypeVar("Model", bound=_PublicRow)


def _is_public_row(row: Mapping[str, Any]) -> bool:
    """Whether a row is of one of the public formats."""
    return "problem_statement" in row and ("instance_id" in row or "docker_image" in row)


def _parse_public_row(row: Mapping[str, Any]) -> SweTask:
    """Read a row of SWE-bench, SWE-Gym or R2E-Gym.

    Raises:
        TaskError: ``BAD_ROW``, naming the row and the missing or wrong field.
    """
    # A tool may have added an instance_id to a row of R2E-Gym; rows of SWE-bench have no expected output.
    return _read_r2e_gym(row) if "expected_output_json" in row else _read_swe_bench(row)


def _read_swe_bench(row: Mapping[str, Any]) -> SweTask:
    read = _parse(_SweBenchRow, row)
    source = read.source
    named = row.get("docker_image") or row.get("image_name")
    template = "row" if named else "swe-bench" if source == "swebench" else "swe-gym"
    return SweTask(
        id=read.instance_id,
        question=read.problem_statement,
        image=_image_reference(TEMPLATES[template](row)),
        workdir=WORKDIR,
        base_commit=read.base_commit,
        repository=Repository(),
        tests=TestPlan(
            patch=read.test_patch,
            command="" if source == "swebench" else _pytest_command(read.FAIL_TO_PASS + read.PASS_TO_PASS),
            parser="swebench" if source == "swebench" else "pytest",
            fail_to_pass=read.FAIL_TO_PASS,
            pass_to_pass=read.PASS_TO_PASS,
            seconds=_PUBLIC_SECONDS,
        ),
        gold_patch=read.patch,
        source=source,
        raw=row,
    )


def _read_r2e_gym(row: Mapping[str, Any]) -> SweTask:
    read = _parse(_R2eGymRow, row)
    tests = read.execution_result_content
    names = [name.rsplit("/", 1)[-1] for name in tests.test_file_names]
    files = {f"{R2E_TESTS}/{name}": code for name, code in zip(names, tests.test_file_codes, strict=False)}
    wanted = tuple(name for name, status in _without_colours(read.expected_output_json).items() if status == "PASSED")
    if not wanted:
        raise _bad_row(
            row, "'expected_output_json' names no test that passes", "Leave the row out: nothing can be graded."
        )
    return SweTask(
        id=str(row.get("instance_id") or f"{read.repo_name}__{read.commit_hash[:12]}"),
        question=read.problem_statement,
        image=_image_reference(TEMPLATES["r2e-gym"](row)),
        workdir=WORKDIR,
        base_commit="",  # the image holds the commit before the repair; the row's is the repair
        repository=Repository(),
        tests=TestPlan(
            files=files,
            build="" if files else f"cp -r /{R2E_TESTS} {R2E_TESTS}",
            command=f"bash {SET_ASIDE_DIRECTORY}/run_tests.sh",
            parser="pytest",
            fail_to_pass=wanted,
            seconds=_PUBLIC_SECONDS,
        ),
        gold_patch=_patch_of(read.parsed_commit_content),
        source="r2egym",
        raw=row,
    )


def _parse(model: type[Model], row: Mapping[str, Any]) -> Model:
    try:
        return model.model_validate(row)
    except ValidationError as error:
        complaint = config_error_of(error, model, f"swe row {_name(row)}")
        raise TaskError(FailureKind.BAD_ROW, complaint.what, complaint.fix) from None


def _from_json(value: object) -> object:
    """Parquet files of these collections hold lists and objects as JSON text."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        raise ValueError("is text, but no JSON") from None


def _pytest_command(tests: tuple[str, ...]) -> str:
    """Run the files that the named tests are in."""
    files = dict.fromkeys(name.partition("::")[0] for name in tests if "::" in name)
    return " ".join(["python -m pytest -rA -p no:cacheprovider", *map(shlex.quote, files)])


def _without_colours(expected: Mapping[str, str]) -> dict[str, str]:
    return {_COLOUR.sub("", name).split(" - ")[0]: status for name, status in expected.items()}


def _patch_of(commit: Mapping[str, Any]) -> str:
    """Return the patch of a parsed commit from its texts before and after; edits to tests are not in it."""
    patches: list[str] = []
    for diff in _mappings(commit.get("file_diffs")):
        header = diff.get("header")
        file: Any = cast(Mapping[str, Any], header).get("file") if isinstance(header, Mapping) else None
        path: Any = cast(Mapping[str, Any], file).get("path") if isinstance(file, Mapping) else None
        old, new = diff.get("old_file_content"), diff.get("new_file_content")
        if isinstance(path, str) and isinstance(old, str) and isinstance(new, str) and old != new:
            patches.append(git_diff(path, old, new))
    return "".join(patches)


def _mappings(value: object) -> list[Mapping[str, Any]]:
    items = cast(list[object], value) if isinstance(value, list) else []
    return [cast(Mapping[str, Any], item) for item in items if isinstance(item, Mapping)]


def git_diff(path: str, old: str, new: str) -> str:
    """Return a diff of two texts for ``git apply``; an empty text means no file."""
    head = f"diff --git a/{path} b/{path}\n"
    if not old:
        head += "new file mode 100644\n"
    elif not new:
        head += "deleted file mode 100644\n"
    lines = difflib.unified_diff(
        _lines(old), _lines(new), f"a/{path}" if old else "/dev/null", f"b/{path}" if new else "/dev/null"
    )
    return head + "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)


def _lines(text: str) -> list[str]:
    """Split as git does: only a line feed ends a line."""
    return [line + "\n" for line in text.split("\n")[:-1]] + ([last] if (last := text.rpartition("\n")[2]) else [])


def _image_reference(image: str) -> str:
    return image if image.startswith("/") or "://" in image else f"{DOCKER_SCHEME}{image}"


def _name(row: Mapping[str, Any]) -> str:
    return str(row.get("instance_id") or row.get("docker_image") or "without id")[:80]


def _bad_row(row: Mapping[str, Any], what: str, fix: str) -> TaskError:
    return TaskError(FailureKind.BAD_ROW, f"swe row {_name(row)}: {what}.", fix)
