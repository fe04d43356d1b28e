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
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, cast

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from prorl_gym.environments.row_format import RowStep, TaskRow, parse_row
from prorl_gym.environments.swe.controls.control_plan import ControlPlan
from prorl_gym.errors import FailureKind, TaskError
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

Row = Mapping[str, Any]

_IMAGE_KEYS = ("image", "docker_image", "image_name")
_NESTED = ("instance", "task", "metadata", "verifier_metadata", "extra_info")

_CONDA = "if [ -f /opt/miniconda3/bin/activate ]; then . /opt/miniconda3/bin/activate testbed; fi\n"
"""The conda environment with the interpreter of the tests, in images of SWE-Gym."""
_PYTEST = ("python", "-m", "pytest", "-rA", "-p", "no:cacheprovider")
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True, slots=True)
class TestPlan:
    """Hidden tests; see ``GenericTests``. Nothing of them may enter the agent's sandbox or the prompt."""

    command: str
    parser: ParserName
    fail_to_pass: tuple[str, ...]
    """Tests that must pass now. Of an R2E-Gym row: all that must, named without their file (``Class.test``)."""
    seconds: float
    files: Mapping[str, str] = field(default_factory=dict[str, str])
    patch: str = ""
    removed: tuple[str, ...] = ()
    build: str = ""
    pass_to_pass: tuple[str, ...] = ()
    controls: ControlPlan | None = None
    """``None`` when none were searched for as the row was made."""

    __test__ = False


@dataclass(frozen=True, slots=True)
class SweTask:
    """One repository to repair; see ``GenericSweRow``."""

    id: str
    question: str
    image: str
    workdir: str
    base_commit: str
    tests: TestPlan
    gold_patch: str
    """Enters only the clean sandbox, and only when gold is graded."""
    source: Source
    raw: Mapping[str, Any]
    """The row as submitted, for the harness of SWE-bench."""
    archive: str = ""
    path: str = ""
    sha256: str = ""
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
# Git refuses a diff whose last line has no end. The heredoc of SWE-bench's scripts ends it.
Diff = Annotated[str, AfterValidator(lambda text: text if text.endswith("\n") or not text else f"{text}\n")]


class GenericTests(BaseModel):
    """Hidden tests of a generic row, put in place in the clean sandbox only."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    files: dict[PathInside, str] = {}
    """Hidden tests: path below the working directory and text."""
    patch: Diff = ""
    """Unified diff of further hidden tests, applied after ``files``."""
    removed: tuple[PathInside, ...] = ()
    """Paths to remove before the run, for example the versions that the agent could see."""
    build: str = ""
    """Shell command before the tests. When it fails the tests do not run: not solved."""
    command: str = Field(min_length=1)
    """Shell command that runs the tests."""
    parser: Literal["pytest", "unittest", "django", "tap", "go", "jest", "cargo"]
    """Reader of its log."""
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
    """SHA-256 of the file at ``path``."""
    tests: GenericTests
    """Hidden tests. They never leave the service's side before grading."""
    patch: Diff = ""
    """Gold patch: a unified diff that solves the row."""

    @model_validator(mode="after")
    def _one_repository(self) -> "GenericSweRow":
        if self.archive and self.path:
            raise ValueError("'archive' and 'path' exclude each other")
        if bool(self.path) != bool(self.sha256):
            raise ValueError("'path' and 'sha256' belong together")
        return self


def parse_swe_row(row: Mapping[str, Any]) -> SweTask:
    """Read a row of any known format. Raises ``TaskError`` (BAD_ROW), naming the row and the missing or wrong field."""
    if "problem_statement" in row and ("instance_id" in row or "docker_image" in row):
        # A tool may have added an instance_id to a row of R2E-Gym; rows of SWE-bench have no expected output.
        return _read_r2e_gym(row) if "expected_output_json" in row else _read_swe_bench(row)
    fields = dict(parse_row(GenericSweRow, "swe", row))
    tests, gold_patch = TestPlan(**dict(fields.pop("tests"))), fields.pop("patch")
    return SweTask(**fields, tests=tests, gold_patch=gold_patch, source="generic", raw=row)


def _from_json(value: object) -> object:
    """Parquet files of these collections hold lists and objects as JSON text."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        raise ValueError("is text, but no JSON") from None


class _PublicRow(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)

    problem_statement: str = Field(min_length=1)


class _SweBenchRow(_PublicRow):
    instance_id: str = Field(min_length=1)
    repo: str = Field(min_length=1)
    base_commit: str = Field(pattern=r"^[0-9a-f]{7,64}$")
    patch: Diff
    test_patch: Diff
    version: str | None = None
    environment_setup_commit: str | None = None
    FAIL_TO_PASS: Annotated[tuple[str, ...], BeforeValidator(_from_json)] = Field(min_length=1)
    PASS_TO_PASS: Annotated[tuple[str, ...], BeforeValidator(_from_json)]


class _R2eFiles(BaseModel):
    model_config = ConfigDict(extra="ignore")

    test_file_names: tuple[str, ...] = ()
    test_file_codes: tuple[str, ...] = ()


class _R2eGymRow(_PublicRow):
    docker_image: str = Field(min_length=1)
    repo_name: str = Field(min_length=1)
    commit_hash: str = Field(pattern=r"^[0-9a-f]{7,64}$")
    parsed_commit_content: Annotated[dict[str, Any], BeforeValidator(_from_json)]
    execution_result_content: Annotated[_R2eFiles, BeforeValidator(_from_json)]
    expected_output_json: Annotated[dict[str, str], BeforeValidator(_from_json)] = Field(min_length=1)


def _read_swe_bench(row: Mapping[str, Any]) -> SweTask:
    read = parse_row(_SweBenchRow, "swe", {**row, "id": _name(row)})
    foreign = read.repo.lower() in _SWE_GYM or read.version is None
    source: Source = "swegym" if foreign and read.environment_setup_commit is None else "swebench"
    test_files = [name.partition("::")[0] for name in read.FAIL_TO_PASS + read.PASS_TO_PASS if "::" in name]
    named = row.get("docker_image") or row.get("image_name")
    template = "row" if named else "swe-bench" if source == "swebench" else "swe-gym"
    return SweTask(
        id=read.instance_id,
        question=read.problem_statement,
        image=image_reference(IMAGE_NAMES[template](row)),
        workdir=WORKDIR,
        base_commit=read.base_commit,
        tests=TestPlan(
            patch=read.test_patch,
            command="" if source == "swebench" else _CONDA + shlex.join([*_PYTEST, *dict.fromkeys(test_files)]),
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
    read = parse_row(_R2eGymRow, "swe", {**row, "id": _name(row)})
    tests = read.execution_result_content
    names = [name.rsplit("/", 1)[-1] for name in tests.test_file_names]
    files = {f"{R2E_TESTS}/{name}": code for name, code in zip(names, tests.test_file_codes, strict=False)}
    expected = {_COLOUR.sub("", name).split(" - ")[0]: status for name, status in read.expected_output_json.items()}
    wanted = tuple(name for name, status in expected.items() if status == "PASSED")
    if not wanted:
        what = f"swe row {_name(row)}: 'expected_output_json' names no test that passes."
        raise TaskError(FailureKind.BAD_ROW, what, "Leave the row out: nothing can be graded.")
    return SweTask(
        id=str(row.get("instance_id") or f"{read.repo_name}__{read.commit_hash[:12]}"),
        question=read.problem_statement,
        image=image_reference(IMAGE_NAMES["r2e-gym"](row)),
        workdir=WORKDIR,
        base_commit="",  # the image holds the commit before the repair; the row's is the repair
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


def _patch_of(commit: Mapping[str, Any]) -> str:
    """Return the patch of a parsed commit from its texts before and after; edits to tests are not in it."""
    patches: list[str] = []
    diffs: Any = commit.get("file_diffs")
    for diff in cast(list[Any], diffs) if isinstance(diffs, list) else ():
        try:
            path, old, new = diff["header"]["file"]["path"], diff["old_file_content"], diff["new_file_content"]
        except (KeyError, TypeError):
            continue
        if isinstance(path, str) and isinstance(old, str) and isinstance(new, str) and old != new:
            patches.append(git_diff(path, old, new))
    return "".join(patches)


def git_diff(path: str, old: str, new: str) -> str:
    """Return a diff of two texts for ``git apply``; an empty text means no file."""
    head = f"diff --git a/{path} b/{path}\n"
    if not old:
        head += "new file mode 100644\n"
    elif not new:
        head += "deleted file mode 100644\n"
    # As git, and unlike splitlines: only a line feed ends a line.
    before, after = (re.findall(r"[^\n]*\n|[^\n]+", text) for text in (old, new))
    lines = difflib.unified_diff(
        before, after, f"a/{path}" if old else "/dev/null", f"b/{path}" if new else "/dev/null"
    )
    return head + "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)


def _name(row: Mapping[str, Any]) -> str:
    return str(row.get("instance_id") or row.get("docker_image") or "without id")[:80]


# Names of images. SWE-bench publishes ``swebench/sweb.eval.x86_64.<instance>`` with ``__`` written ``_1776_``, SWE-Gym
# ``xingyaoww/sweb.eval.x86_64.<instance>`` with ``__`` written ``_s_``; rows of R2E-Gym contain the name itself.


class MissingKeyError(Exception):
    """A row lacks a key. Args: its name."""


def read_key(row: Row, name: str) -> str:
    """Return a text of a row, at its top or one level below. Raises ``MissingKeyError``."""
    for place in (row, *(row.get(nest) for nest in _NESTED)):
        if isinstance(place, Mapping):
            value = cast(Row, place).get(name)
            if isinstance(value, str) and value:
                return value
    raise MissingKeyError(name)


def image_reference(image: str) -> str:
    """Return the name of an image with its scheme; a path stays as it is."""
    return image if image.startswith("/") or "://" in image else f"{DOCKER_SCHEME}{image}"


def _named_image(row: Row) -> str:
    for key in _IMAGE_KEYS:
        with suppress(MissingKeyError):
            return read_key(row, key)
    raise MissingKeyError(" or ".join(_IMAGE_KEYS))


def _instance_image(owner: str, joint: str) -> Callable[[Row], str]:
    return lambda row: f"{owner}/sweb.eval.x86_64.{read_key(row, 'instance_id').replace('__', joint).lower()}:latest"


IMAGE_NAMES: Mapping[str, Callable[[Row], str]] = {
    "row": _named_image,
    "swe-bench": _instance_image("swebench", "_1776_"),
    "swe-gym": _instance_image("xingyaoww", "_s_"),
    "r2e-gym": lambda row: read_key(row, "docker_image"),
}
"""The image of a row, by collection; each raises ``MissingKeyError``."""
