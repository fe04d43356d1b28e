# SPDX-FileCopyrightText: Copyright (c) 2026 the prorl-gym authors
# SPDX-License-Identifier: Apache-2.0

"""Grading by the row alone. The server's other tests are in prorl-gym's own suite (tests/gym)."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from prorl_gym.errors import TaskError
from prorl_gym.gym_root.resources_servers.prorl_rollout.app import RowVerifier, VerifyRequest

CASES = [json.loads(line) for line in Path(__file__).with_name("verifier_cases.jsonl").read_text("utf-8").splitlines()]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_answer_is_graded_as_the_case_says(case: dict[str, Any]) -> None:
    """The same cases are the fixture of ``gym env test``, which NeMo Gym 0.7 has."""
    grading = RowVerifier().verify(VerifyRequest.model_validate(case["request"]))
    if "expected_error" in case:
        with pytest.raises(TaskError, match=case["expected_error"]):
            asyncio.run(grading)
    else:
        reply = asyncio.run(grading)
        assert (reply["reward"], reply["mask_sample"]) == (case["expected_reward"], False), reply["failure_reason"]
