"""What users hold is what it was, but for the names that ``renames.json`` lists."""

import json
import re

import pytest
from golden import DOCUMENTS, ENVIRONMENTS, FOLDER, records, text


def renamed(document: str) -> str:
    """Return a committed document with today's names."""
    renames: dict[str, str] = json.loads((FOLDER / "renames.json").read_text(encoding="utf-8"))
    if not renames:
        return document
    old = re.compile("|".join(rf"(?<![\w-]){re.escape(name)}(?![\w-])" for name in renames))
    return old.sub(lambda found: renames[found[0]], document)


@pytest.mark.parametrize("name", DOCUMENTS)
def test_it_is_what_it_was(name: str) -> None:
    committed = json.loads(renamed((FOLDER / f"{name}.json").read_text(encoding="utf-8")))
    assert json.loads(text(DOCUMENTS[name]())) == committed, f"meant to change: python tests/golden/golden.py {name}"


@pytest.mark.slow
@pytest.mark.parametrize("environment", ENVIRONMENTS)
async def test_records_are_what_they_were(environment: str) -> None:
    committed = json.loads(renamed((FOLDER / f"{environment}.json").read_text(encoding="utf-8")))
    assert json.loads(text(await records(environment))) == committed
