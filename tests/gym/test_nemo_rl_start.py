"""Recipes of ``recipes/nemo_rl`` on NeMo Gym, as NeMo-RL starts them, over engines that behave as its vLLM servers.

Slow: each starts NeMo Gym, and Ray before 0.7. What is posted is what ``nemo_rl_start.py`` says.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from prorl_gym.trainers.nemo_rl import check_group, check_result

pytestmark = [pytest.mark.gym, pytest.mark.release, pytest.mark.timeout(900)]

SAMPLES = 8


def answers_of(algorithm: str, domain: str, file: Path) -> list[dict[str, Any]]:
    program = Path(__file__).with_name("nemo_rl_start.py")
    subprocess.run(
        [sys.executable, str(program), algorithm, domain, str(file)], check=True, stdin=subprocess.DEVNULL, timeout=850
    )
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def groups(answers: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """The results of each prompt, in the order of its rows."""
    rows = sorted(answers, key=lambda answer: answer["row"]["_rowidx"])
    results = [answer["result"] for answer in rows]
    return [results[start : start + SAMPLES] for start in range(0, len(results), SAMPLES)]


def test_dapo_masks_what_is_cut_short_or_fails(tmp_path: Path):
    *good, cut, bad, lost = groups(answers_of("dapo", "math", tmp_path / "answers.jsonl"))
    assert len(good) == 2
    for group in (*good, cut, bad, lost):
        assert len(group) == SAMPLES
        check_group(group)
        for result in group:
            check_result(result)
    assert all(result["prorl_outcome"] == "completed" and not result["mask_sample"] for g in good for result in g)
    assert {result["reward"] for group in good for result in group} == {0.0, 1.0}
    assert all(result["prorl_truncated"] and result["mask_sample"] for result in cut)
    assert all(result["failure_kind"] == "prorl:bad_row" and result["prorl_placeholder"] for result in bad)
    assert {result["failure_kind"] for result in lost} == {None, "provider_unavailable"}
    assert all(result["mask_sample"] is (result["failure_kind"] is not None) for result in lost)


def test_single_controller_gets_an_error_for_each_failure_of_all_four_environments(tmp_path: Path):
    answers = answers_of("sc", "blend", tmp_path / "answers.jsonl")
    answered = [answer for answer in answers if "result" in answer]
    refused = [answer["status"] for answer in answers if "status" in answer]
    assert len(answers) == SAMPLES * (2 * 4 + 3)
    assert set(refused) == {503}
    assert SAMPLES < len(refused) < 2 * SAMPLES  # a group that is no row, and some of one whose engines fail
    agents = {answer["row"]["agent_ref"]["name"] for answer in answered}
    assert agents == {f"prorl_{name}_agent" for name in ("math", "code", "stem", "swe")}
    for answer in answered:
        check_result(answer["result"])
        assert answer["result"]["mask_sample"] is False
