"""What NeMo Gym itself says about our components, asked in process."""

import asyncio
import json
from pathlib import Path

import gym_needed  # noqa: F401
import pytest

pytestmark = pytest.mark.gym

from nemo_gym.environment.validation import validate_environment  # noqa: E402

from prorl_gym.cli.installation import gym_root  # noqa: E402
from prorl_gym.data.benchmarks import BENCHMARKS, benchmark_file  # noqa: E402

NAMES = ("prorl_code", "prorl_math", "prorl_stem", "prorl_swe", "prorl_taskdir")


@pytest.fixture(autouse=True)
def our_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEMO_GYM_EXTRA_ROOTS", str(gym_root()))


@pytest.mark.parametrize("name", NAMES)
def test_manifest_config_and_the_agent_of_the_rows_agree(name: str):
    report = validate_environment(gym_root() / "environments" / name / "manifest.yaml")
    assert report.inferred_profile == report.declared_profile
    assert not report.warnings
    assert [(dataset.name, dataset.rows) for dataset in report.datasets] == [("example", 5)]
    agent = next(component.name for component in report.components if component.role == "agent_server")
    rows = (gym_root() / "environments" / name / "data/example.jsonl").read_text().splitlines()
    assert {json.loads(row)["agent_ref"]["name"] for row in rows} == {agent}


@pytest.mark.parametrize("name", BENCHMARKS)
def test_manifest_and_config_of_a_benchmark_agree(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    rows = tmp_path / benchmark_file(name)
    rows.parent.mkdir(parents=True)
    examples = gym_root() / f"environments/prorl_{BENCHMARKS[name].environment}/data/example.jsonl"
    rows.write_bytes(examples.read_bytes())
    report = validate_environment(gym_root() / "benchmarks" / name / "manifest.yaml")
    assert report.inferred_profile == report.declared_profile
    assert not report.warnings
    assert [(dataset.name, dataset.rows) for dataset in report.datasets] == [(name, 5)]


def test_server_directories_are_what_gym_accepts():
    for kind in ("resources_servers", "responses_api_agents", "responses_api_models"):
        for folder in (gym_root() / kind).iterdir():
            names = {path.name for path in folder.iterdir()}
            assert {"app.py", "configs", "requirements.txt", "README.md"} <= names, folder
            assert "../.." not in (folder / "requirements.txt").read_text()
        assert not (gym_root() / kind / "__init__.py").exists()


@pytest.mark.slow
def test_fixture_cases_grade_as_they_say(tmp_path: Path):
    from nemo_gym.verifier_fixture import exercise_verifier_fixture

    from prorl_gym.gym_root.resources_servers.prorl_rollout.app import VERIFIER_FIXTURE

    results = asyncio.run(exercise_verifier_fixture(VERIFIER_FIXTURE, reward_range=(0.0, 1.0), determinism="seeded"))
    assert {result.kind for result in results} == {"full_reward", "zero_reward", "malformed", "determinism"}
