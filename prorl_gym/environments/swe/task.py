"""What every format of SWE rows is read into."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from prorl_gym.environments.rows import RowStep
from prorl_gym.environments.swe.controls.plan import ControlPlan

Source = Literal["swebench", "swegym", "r2egym", "generic"]
ParserName = Literal["pytest", "unittest", "django", "tap", "go", "jest", "cargo", "swebench"]


@dataclass(frozen=True, slots=True)
class Repository:
    """Where the code under repair comes from; at most one of both is set, and the image holds it when none is."""

    archive: str = ""
    """Base64 of a tar.gz whose root is the tree: for small repositories."""
    path: str = ""
    """A tar.gz on the service's host (absolute), checked against ``sha256``."""
    sha256: str = ""


@dataclass(frozen=True, slots=True)
class TestPlan:
    """How a repaired repository is judged. Nothing of it may enter the agent's sandbox or the prompt."""

    files: Mapping[str, str]
    """Hidden tests: path below the working directory -> text. Written before the run, in the clean sandbox only."""
    patch: str
    """Unified diff of further hidden tests, applied after ``files``."""
    removed: tuple[str, ...]
    """Paths that are removed before the run, for example the versions that the agent could see."""
    build: str
    """Shell command before the tests, or ``""``. When it fails the tests do not run: not solved."""
    command: str
    """Shell command that runs the tests."""
    parser: ParserName
    fail_to_pass: tuple[str, ...]
    """Tests that must pass now. Of an R2E-Gym row: all that must, named without their file (``Class.test``)."""
    pass_to_pass: tuple[str, ...]
    """Tests that passed before and still must."""
    seconds: float
    """Wall clock for build and tests together."""
    controls: ControlPlan | None = None
    """What was proven when the row was made; ``None``: nothing was tried."""

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
    """Enters no sandbox but the clean one, and that only when gold is graded."""
    source: Source
    raw: Mapping[str, Any]
    """The row as it was: the harness of SWE-bench wants it."""
    gold_steps: tuple[RowStep, ...] = ()
    wrong_steps: tuple[RowStep, ...] = ()
