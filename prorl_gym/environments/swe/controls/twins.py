"""Test files in which each test stands beside its controls, under names that tell nothing."""

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from prorl_gym.environments.swe.controls.plan import Edit, TestFunction
from prorl_gym.environments.swe.controls.source import TestFile, splice
from prorl_gym.environments.swe.parsers import PASSING, Status

_OF_EACH = 3
"""Controls of a test that stand beside it."""


@dataclass(frozen=True, slots=True)
class Twins:
    """A file, and what its names mean."""

    text: str
    controls: Mapping[str, tuple[str, Edit]]
    """Function and edit of each control, by the name that it was given."""


def make_twins(source: str, functions: Sequence[TestFunction], rng: random.Random) -> Twins:
    """Return a file with the given functions and their controls in a shuffled order, and without other tests.

    Args:
        source: the file.
        functions: those of this file that have controls.
        rng: draws names and order.

    Raises:
        ValueError: see ``TestFile``.
    """
    file = TestFile(source)
    wanted = {each.defined: each for each in functions}
    replacements: list[tuple[int, int, str]] = []
    controls: dict[str, tuple[str, Edit]] = {}
    for name, found in file.all:
        start, end = file.span(found.node)
        function = wanted.get(name)
        inner = [edit for edit in function.variants if start <= edit.start and edit.end <= end] if function else []
        inner = inner[:_OF_EACH]
        if function is None or not inner or file.functions[name] is not found:
            if name.rpartition("::")[2].startswith("test"):
                replacements.append((start, end, "pass"))
            continue
        indent = " " * (start - (source.rfind("\n", 0, start) + 1))
        copies: list[str] = []
        for edit in (None, *inner):
            text = (
                edit.apply(source)[start : end + len(edit.text) - (edit.end - edit.start)]
                if edit
                else source[start:end]
            )
            fresh = f"test_{rng.getrandbits(40):010x}"
            bare = name.rpartition("::")[2]
            copies.append(re.sub(rf"(\bdef\s+){re.escape(bare)}\b", rf"\g<1>{fresh}", text, count=1))
            if edit is not None:
                controls[fresh] = (f"{function.path}::{function.name}", edit)
        rng.shuffle(copies)
        replacements.append((start, end, f"\n\n{indent}".join(copies)))
    return Twins(splice(source, replacements), controls)


def unfailed(statuses: Mapping[str, Status], controls: Mapping[str, object]) -> tuple[str, ...]:
    """Return the controls that are not reported as failed in any of their parameters."""
    failed: set[str] = set()
    for test, status in statuses.items():
        name = re.split(r"::|\.", test.partition("[")[0])[-1]
        if name in controls and status not in PASSING and status != "skipped":
            failed.add(name)
    return tuple(name for name in controls if name not in failed)
