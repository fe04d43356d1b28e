"""Shapes built into the trainers' own classes, where these can be imported (``.ci/trainers`` installs TRL and verl)."""

from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
from rollout_samples import cancelled, failed, rollout
from trainer_samples import IDS, LOGPROBS, MASK, PAD, of_group, overlong, scored, silent, two_segments, with_experts

from prorl_gym.records import Rollout
from prorl_gym.trainers.areal import to_areal
from prorl_gym.trainers.skyrl import to_skyrl
from prorl_gym.trainers.slime import normalize_rewards, to_slime
from prorl_gym.trainers.trl import served_reward, to_trl
from prorl_gym.trainers.verifiers import to_verifiers
from prorl_gym.trainers.verl import to_verl

pytestmark = pytest.mark.timeout(300)  # importing them alone takes many seconds


def from_checkout(module: str) -> Any:
    """Import a module of a trainer that is on no index; skip where no checkout of it is on ``PYTHONPATH``."""
    return pytest.importorskip(module, reason=f"{module} cannot be imported here", exc_type=ImportError)


# --- verl


@pytest.mark.verl
def test_verl_builds_its_own_output():
    output_class = import_module("verl.experimental.agent_loop.agent_loop").AgentLoopOutput
    built = [output_class(**fields).as_dict() for fields in to_verl(two_segments())]
    assert built[0]["prompts"].tolist() + built[0]["responses"].tolist() == IDS
    assert built[0]["response_mask"].tolist() == MASK[3:]
    assert built[0]["rollout_log_probs"].tolist() == LOGPROBS[3:]
    assert [one["rm_scores"].tolist() for one in built] == [[0.0, 0.0, 0.0, 0.0, 1.0], [0.0, 1.0]]
    (masked,) = to_verl(overlong())
    assert output_class(**masked).as_dict()["response_mask"].sum() == 0


@pytest.mark.verl
def test_verl_aligns_routed_experts_with_its_tokens():
    output_class = import_module("verl.experimental.agent_loop.agent_loop").AgentLoopOutput
    (fields,) = to_verl(rollout(segments=[with_experts()]))
    assert output_class(**fields).as_dict()["routed_experts"][:, 0, 0].tolist() == [0, 1, 2, 3, 4, 5, 6, 0]


# --- verifiers and prime-rl


def trace_of(one: Rollout) -> Any:
    trace, task = import_module("verifiers.v1.trace"), import_module("verifiers.v1.task")
    state, agent = import_module("verifiers.v1.state"), import_module("verifiers.v1.configs.agent")
    made = trace.Trace[task.WireTaskData, state.State, agent.WireAgentConfig]
    return made.model_validate(to_verifiers(one, {"idx": 0}))


@pytest.mark.verifiers
def test_verifiers_builds_its_own_trace():
    trace = trace_of(two_segments())
    first, second = trace.branches
    assert (first.token_ids, first.logprobs) == (IDS, LOGPROBS)
    assert first.sampled_mask == [bool(sampled) for sampled in MASK]
    assert second.token_ids == [1, 2, 3, 100, 9]
    assert (trace.reward, trace.has_error, trace.num_turns) == (1.0, False, 3)
    assert "math" in trace.rewards


@pytest.mark.verifiers
@pytest.mark.parametrize("ending", [failed, cancelled, silent, overlong])
def test_a_trace_that_must_not_be_trained_on_is_an_error_to_verifiers(ending: Any):
    assert trace_of(ending()).has_error


@pytest.mark.verifiers
def test_verifiers_has_the_experts_of_each_token():
    (branch,) = trace_of(rollout(segments=[with_experts()])).branches
    assert branch.routed_experts[:, 0, 0].tolist() == [0, 1, 2, 3, 4, 5, 6, 0]


# --- slime, SkyRL and AReaL: where a checkout of theirs is at hand


def test_slime_builds_its_own_samples():
    sample_class = from_checkout("slime.utils.types").Sample
    samples = [
        sample_class.from_dict(fields)
        for place, one in enumerate([two_segments(), failed(), scored(0.0), silent()])
        for fields in to_slime(one, group_index=0, rollout_index=place, placeholder_id=PAD)
    ]
    for sample in samples:
        sample.append_response_tokens()  # of none: checks the lengths of what is there
    assert [sample.effective_response_length for sample in samples] == [4, 2, 0, 4, 0]
    _, advantages = normalize_rewards(SimpleNamespace(grpo_std_normalization=False), samples)
    assert advantages == [0.5, 0.5, 0.0, -0.5, 0.0]


@pytest.mark.parametrize("step_wise", [False, True])
def test_skyrl_accepts_the_output(step_wise: bool):
    base, validation = from_checkout("skyrl.train.generators.base"), from_checkout("skyrl.train.utils.trainer_utils")
    members = of_group(rollout(segments=[with_experts()]), silent(), rollout(segments=[with_experts()]))
    names = [base.TrajectoryID("g", place) for place in range(3)]
    output = to_skyrl(members, names, placeholder_id=PAD, step_wise=step_wise)
    assert set(output) <= set(base.GeneratorOutput.__annotations__)
    validation.validate_generator_output(3, output, step_wise=step_wise, routes_expected=True)


def test_areal_accepts_the_trajectory():
    check = from_checkout("areal.infra.workflow_executor").check_trajectory_format
    torch = from_checkout("torch")
    for group in (of_group(two_segments(), overlong(), silent(), rollout()), [failed()]):
        rows = to_areal(group, placeholder_id=PAD)
        assert check(rows and {key: torch.tensor(value) for key, value in rows.items()})


# --- TRL: a training step


@pytest.mark.trl
def test_trl_trains_on_records_and_neither_learns_from_a_failure_nor_counts_it():
    trl, transformers = import_module("trl"), import_module("transformers")
    torch, datasets = import_module("torch"), import_module("datasets")
    tokenizers = import_module("tokenizers")
    torch.set_num_threads(1)
    words = {f"w{number}": number for number in range(128)} | {"<pad>": 128, "<eos>": 129, "<unk>": 130}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
    model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(vocab_size=131, **sizes, **heads))
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    members = of_group(scored(1.0), failed(), two_segments(score=scored(0.0).score), silent(), scored(0.0), scored(0.5))
    seen: list[dict[str, Any]] = []

    class Watched(trl.GRPOTrainer):
        def _generate_and_score_completions(self, inputs: Any) -> Any:
            seen.append(super()._generate_and_score_completions(inputs))
            return seen[-1]

    settings: dict[str, Any] = {"num_generations": 6, "per_device_train_batch_size": 6, "max_steps": 1, "beta": 0.0}
    quiet: dict[str, Any] = {"report_to": [], "use_cpu": True, "save_strategy": "no", "learning_rate": 1e-2}
    trainer = Watched(
        model=model,
        processing_class=tokenizer,
        args=trl.GRPOConfig(loss_type="dapo", scale_rewards="none", **settings, **quiet),
        train_dataset=datasets.Dataset.from_list([{"prompt": "w1 w2 w3"}] * 6),
        rollout_func=lambda prompts, _: to_trl(members[: len(prompts)], placeholder_id=PAD),
        reward_funcs=served_reward,
    )
    trainer.train()
    (batch,) = seen
    # The mean is that of the four rewards 1, 0, 0 and 0.5: a failure does not vote, a rewritten history does.
    assert batch["advantages"].tolist() == pytest.approx([0.625, 0.0, -0.375, 0.0, -0.375, 0.125])
    assert batch["completion_ids"][0].tolist() == IDS[3:]
    assert (batch["tool_mask"] * batch["completion_mask"]).tolist()[:4] == [MASK[3:], [0] * 5, [0] * 5, [0] * 5]
    assert any(not torch.equal(before[name], value) for name, value in model.named_parameters())
