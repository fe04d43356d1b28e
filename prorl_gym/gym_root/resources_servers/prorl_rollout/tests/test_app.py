"""Grading by the row alone. The server's other tests are in prorl-gym's own suite (tests/gym)."""

from nemo_gym.verifier_fixture import exercise_verifier_fixture

from prorl_gym.gym_root.resources_servers.prorl_rollout.app import VERIFIER_FIXTURE


async def test_verifier_cases() -> None:
    """Full, zero, malformed and repeated answers are graded as the fixture says."""
    results = await exercise_verifier_fixture(VERIFIER_FIXTURE, reward_range=(0.0, 1.0), determinism="seeded")
    assert {result.kind for result in results} == {"full_reward", "zero_reward", "malformed", "determinism"}
