"""Unmodified agent programs in front of a real server: all that it samples is recorded as it was sampled."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from real_fleet import TOKENIZER, Checkpoints, Figures
from real_server import MODEL, VOCAB, RealServer
from real_workload import SAME
from scripted_gateway import NotedGateway

from prorl_gym.agents.protocol import Artifacts
from prorl_gym.environments import registry
from prorl_gym.errors import LimitReached
from prorl_gym.harness.command import CommandAgent
from prorl_gym.harness.programs import find_program
from prorl_gym.inference.engines.vllm import VllmEngine, VllmOptions
from prorl_gym.inference.tokens.template_check import load_codec
from prorl_gym.rollout.scheduling.sandbox_leases import SandboxLeases
from prorl_gym.sandbox.backend_selection import open_backend
from prorl_gym.sandbox.config import SandboxConfig
from prorl_gym.sandbox.protocol import SandboxBackend
from prorl_gym.settings import RolloutSettings, resolve_settings

pytestmark = [
    *(pytest.mark.vllm, pytest.mark.harness, pytest.mark.product, pytest.mark.timeout(1800)),
    pytest.mark.asyncio(loop_scope="module"),
]

CONTEXT = 16_384
TURNS = 3
TASK = "What is 2 + 2?"
TOOLS = {"mini-swe-agent": (["bash"], ["command"]), "codex": (["exec", "_command"], ["c", "m", "d"])}
"""The tool that runs commands and its argument, in tokens. The two presets differ in wire and streaming."""


@pytest.fixture(scope="module")
def server(vllm_python: str, checkpoints: Checkpoints, tmp_path_factory: pytest.TempPathFactory):
    server = RealServer(vllm_python, checkpoints.random(1), tmp_path_factory.mktemp("programs"), CONTEXT)
    try:
        server.wait()
        yield server
    finally:
        server.stop()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def sandboxes() -> AsyncIterator[SandboxBackend]:
    backend = await open_backend(SandboxConfig(backend="userns", image="host"))
    yield backend
    await backend.close()


def a_call(preset: str) -> list[str]:
    """A call of the program's shell tool, in tokens that all differ: so weights can say each after the one before."""
    tool, argument = TOOLS[preset]
    opening = ("<tool_call>", '{"', "name", '":', ' "', *tool, '",', '"', "arguments", '":\n', ' {"', *argument)
    return [*opening, '"\n', " :", ' "/', "bin", "/", "ls", '"}', "}", "</tool_call>", "<|im_end|>"]


@pytest.mark.parametrize("policy", ["calls", "noise"])
@pytest.mark.parametrize("preset", TOOLS)
async def test_every_sampled_token_is_captured(
    preset: str, policy: str, server: RealServer, sandboxes: SandboxBackend, checkpoints: Checkpoints, figures: Figures
):
    codec = load_codec(str(TOKENIZER))
    if policy == "calls":  # the same call for ever
        pieces = [codec.tokenizer.encode_trusted(piece) for piece in a_call(preset)]
        assert all(len(piece) == 1 for piece in pieces)
        (line_end,) = codec.tokenizer.encode_trusted("\n")
        server.fresh(checkpoints.chain(*(piece[0] for piece in pieces), after=line_end))
    else:
        server.fresh(checkpoints.random(5))
    settings = resolve_settings(RolloutSettings(max_turns=TURNS, max_tokens=CONTEXT, max_turn_tokens=64))
    engine = VllmEngine("vllm", server.url, VllmOptions(model=MODEL, vocab_size=VOCAB, logprob_kind="processed"))
    command = find_program(preset, {}, SandboxConfig().agents_cache_dir())
    gateway = NotedGateway(engine, codec, settings, CONTEXT, command.side_calls)
    leases = SandboxLeases(sandboxes)
    leases.mount_for_agent(command.sandbox_mounts())
    environment = registry.get("math")
    artifacts = Artifacts()
    try:
        task = environment.parse_row({"question": TASK, "answer": "4"})
        episode = await environment.init(task, leases, settings)
        await CommandAgent(command, gateway).run(episode, artifacts)
    except LimitReached:
        pass
    finally:
        await leases.close()
    segments = gateway.session.segments()
    sampled, captured = gateway.count_captured()
    assert captured == sampled > 0, artifacts.log
    if policy == "calls":
        assert [len(segment.generations) for segment in segments] == [TURNS]
    # The engine's own log-probs of the record: it has seen these prompts, and no others.
    farthest = 0.0
    for segment in segments:
        probed = await engine.probe_logprobs(segment.token_ids)
        pairs = zip(segment.mask, segment.logprobs, [0.0, *probed], strict=True)
        farthest = max(farthest, *(abs(ours - theirs) for is_sampled, ours, theirs in pairs if is_sampled))
    await engine.close()
    assert farthest < SAME
    figures[f"{preset}, {policy}: captured exactly"] = (
        f"{captured} of {sampled}",
        "tokens",
        f"in {len(segments)} segments; their log-probs differ from the record's by at most {farthest:.0e}",
    )
