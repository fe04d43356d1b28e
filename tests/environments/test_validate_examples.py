"""``prorl-gym validate`` on the example rows of every environment, as a user would, on both real backends."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "environments"
CACHE = "/var/cache/prorl-gym" if os.geteuid() == 0 else os.path.expanduser("~/.cache/prorl-gym")
IMAGE = Path(os.environ.get("PRORL_GYM_CACHE", CACHE), "images", f"bookworm-{os.geteuid() or 61099}")
NAMES = sorted(path.parents[1].name.removeprefix("prorl_") for path in FOLDER.glob("*/data/example.jsonl"))
USERNS = ("--backend", "userns")
APPTAINER = ("--backend", "apptainer", "--image", str(IMAGE))
ONCE = ("--runs", "1")
"""How often a row comes out the same is seen where a run takes seconds, and before a release."""


def choices() -> Iterator[object]:
    """Yield an environment and the options of its run."""
    for name in NAMES:
        yield pytest.param(name, USERNS + (ONCE if name == "swe" else ()), id=f"{name}-userns")
        on_image = [pytest.mark.apptainer, pytest.mark.product]
        yield pytest.param(name, APPTAINER + ONCE, id=f"{name}-apptainer", marks=on_image)
    yield pytest.param("swe", USERNS, id="swe-userns-thrice", marks=pytest.mark.release)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("name", "choice"), list(choices()))
def test_all_example_rows_are_good(name: str, choice: tuple[str, ...]) -> None:
    if "apptainer" in choice:
        assert IMAGE.is_dir(), f"{IMAGE} is missing: run .ci/base-image"
    file = FOLDER / f"prorl_{name}" / "data" / "example.jsonl"
    done = subprocess.run(
        [sys.executable, "-m", "prorl_gym", "validate", name, str(file), *choice], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert f"gold scores 1.0 and an empty answer 0.0, {1 if '--runs' in choice else 3} times over" in done.stdout
    assert "A wrong answer scored 0.0 as often." in done.stdout
