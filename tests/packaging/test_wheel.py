"""What an installed package holds, and that NeMo Gym sees it."""

import subprocess
import sys
import tarfile
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

EXPECTED = [
    "prorl_gym/pages/assets/dashboard.html",
    "prorl_gym/pages/assets/tokens.js",
    "prorl_gym/py.typed",
    "prorl_gym/oracle/tokenizer/tokenizer.json",
    "prorl_gym/gym_root/environments/prorl_math/manifest.yaml",
    "prorl_gym/gym_root/environments/prorl_code/config.yaml",
    "prorl_gym/gym_root/environments/prorl_math/environment_server.yaml",
    "prorl_gym/gym_root_before_0_7/environments/prorl_math/environment_server.yaml",
    "prorl_gym/gym_root/environments/prorl_math/data/example.jsonl",
    "prorl_gym/gym_root/environments/prorl_stem/manifest.yaml",
    "prorl_gym/gym_root/environments/prorl_swe/data/example.jsonl",
    "prorl_gym/gym_root/environments/prorl_taskdir/manifest.yaml",
    "prorl_gym/cli/init_template/environment.py.txt",
    "prorl_gym/environments/swe/extract.sh",
    "prorl_gym/environments/swe/place.sh",
    "prorl_gym/gym_root/resources_servers/prorl_rollout/app.py",
    "prorl_gym/gym_root/resources_servers/prorl_rollout/requirements.txt",
    "prorl_gym/gym_root/responses_api_agents/prorl_rollout_agent/configs/math.yaml",
    "prorl_gym/gym_root/responses_api_models/prorl_model/configs/prorl_model.yaml",
]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built through the sdist as an index would."""
    folder = tmp_path_factory.mktemp("dist")
    here = ["--no-isolation"] if find_spec("hatchling") else []  # otherwise `build` downloads it
    subprocess.run(
        [sys.executable, "-m", "build", *here, "--outdir", str(folder), str(REPOSITORY)],
        check=True,
        timeout=200,
        capture_output=True,
    )
    return folder


def test_sdist_can_make_the_wheel(built: Path):
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert "prorl_gym/gym_root/environments/prorl_math/manifest.yaml" in names


def test_wheel_holds_what_gym_and_the_demo_need(built: Path):
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert not set(EXPECTED) - names
    assert not [name for name in names if name.startswith(("tests/", "environments/", "bench/", "resources_servers/"))]
    assert "prorl_gym/gym_root/environments/__init__.py" not in names
    assert not [name for name in names if name.endswith(".pth")], "a wheel runs no code at an interpreter's start"
