"""The first prompts of a whole group are the same tokens, whatever sandbox, moment and order its replicas get."""

import asyncio

import pytest
from example_turns import EXAMPLE_ROWS

from prorl_gym.environments import registry
from prorl_gym.environments.row_format import DiskRow
from prorl_gym.inference.tokens.template_check import load_codec
from prorl_gym.rollout.scheduling.sandbox_leases import SandboxLeases
from prorl_gym.sandbox.protocol import SandboxBackend
from prorl_gym.settings import resolve_settings

CODEC = load_codec("small")
GROUP = 3


async def first_prompt(row: DiskRow, backend: SandboxBackend) -> list[int]:
    assert row.environment is not None
    environment = registry.get(row.environment)
    leases = SandboxLeases(backend)
    try:
        episode = await environment.init(
            environment.parse_row(row.task), leases, resolve_settings(environment.settings)
        )
        return CODEC.encode_prompt(episode.messages, [tool.spec.as_function() for tool in episode.tools])
    finally:
        await leases.close()


@pytest.mark.parametrize("row", EXAMPLE_ROWS, ids=lambda row: row.name)
async def test_replicas_get_the_same_tokens(row: DiskRow, backend: SandboxBackend) -> None:
    first, *others = await asyncio.gather(*(first_prompt(row, backend) for _ in range(GROUP)))
    assert len(first) > 50
    assert all(other == first for other in others)
