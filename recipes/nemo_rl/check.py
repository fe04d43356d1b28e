#!/usr/bin/env python3
"""Run NeMo-RL's own code over our recipes and over answers of ``/run``: ``PRORL_NEMO_RL=CHECKOUT check.py ANSWERS...``.

Every recipe goes through NeMo-RL's loader, models and checks of a configuration. The rows of each file of answers
(``tests/gym/nemo_rl_start.py`` writes them; its name begins with that of the recipe) go through what NeMo-RL does from
``/run`` to the batch that it trains on, and the result is compared with what the answers hold. Needs what NeMo-RL
imports, but no GPU, Megatron or vLLM. Nothing of NeMo-RL is replaced but Ray's handle of the actor, whose calls run in
this process, and NeMo Gym, whose answers are those of the file.
"""

import asyncio
import json
import os
import runpy
import subprocess
import sys
import tempfile
import typing
from collections.abc import AsyncIterator, Iterator, Sequence
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

if sys.version_info < (3, 12):  # NeMo-RL wants 3.13; pydantic takes no other TypedDict on an older Python
    import typing_extensions

    typing.TypedDict = typing_extensions.TypedDict

FOLDER = Path(__file__).parent
CHECKOUT = Path(os.environ["PRORL_NEMO_RL"])
MAKE = SimpleNamespace(**runpy.run_path(str(FOLDER / "make.py")))
sys.path.insert(0, str(CHECKOUT))

import torch  # noqa: E402
from nemo_rl.algorithms.grpo import (  # noqa: E402
    MasterConfig,
    _apply_mask_sample_filter,
    _build_async_grpo_train_data,
    _create_advantage_estimator,
    _resolve_logprob_skip_flags,
    _validate_use_kl_in_reward_compat,
    add_grpo_token_loss_masks_and_generation_logprobs,
    dynamic_sampling,
    extract_initial_prompt_messages,
)
from nemo_rl.algorithms.loss import ClippedPGLossFn  # noqa: E402
from nemo_rl.algorithms.single_controller_utils import MasterConfig as SingleControllerConfig  # noqa: E402
from nemo_rl.algorithms.single_controller_utils.config import validate_single_controller_config  # noqa: E402
from nemo_rl.algorithms.utils import calculate_baseline_and_std_per_prompt  # noqa: E402
from nemo_rl.data.llm_message_utils import batched_message_log_to_flat_message  # noqa: E402
from nemo_rl.distributed.batched_data_dict import BatchedDataDict  # noqa: E402
from nemo_rl.environments.nemo_gym import NemoGym, should_use_nemo_gym  # noqa: E402
from nemo_rl.experience.failures import http_status_is_infra  # noqa: E402
from nemo_rl.experience.payload import record_to_train_batch  # noqa: E402
from nemo_rl.experience.rollout_manager import AsyncNemoGymRolloutImpl  # noqa: E402
from nemo_rl.experience.rollouts import (  # noqa: E402
    run_async_nemo_gym_rollout,
    run_nemo_gym_rollout_sync,
    should_mask_flagged_samples,
)
from nemo_rl.utils.config import load_config, register_omegaconf_resolvers  # noqa: E402
from nemo_rl.utils.timer import Timer  # noqa: E402
from omegaconf import OmegaConf  # noqa: E402
from transformers import PreTrainedTokenizerFast  # noqa: E402

Answer = dict[str, Any]


class StoredGym:
    """Answers rows as NeMo Gym's ``RolloutCollectionHelper`` does, out of a file."""

    def __init__(self, answers: Sequence[Answer]) -> None:
        self._answers = answers

    def run_examples(self, examples: list[dict[str, Any]], head_server_config: object) -> Iterator[Any]:
        """Yield awaitables of row and result, in the order in which they came."""
        wanted = {row["_rowidx"]: row for row in examples}
        for answer in self._answers:
            if (index := answer["row"]["_rowidx"]) in wanted:
                yield _ready((wanted[index], json.loads(json.dumps(answer["result"]))))


class LocalActor:
    """Ray's handle of the NeMo Gym actor, without Ray."""

    def __init__(self, answers: Sequence[Answer], tokenizer: PreTrainedTokenizerFast) -> None:
        self._actor = NemoGym.__ray_metadata__.modified_class({})  # the class below Ray's decorator
        self._actor.rh = self  # "its servers are up"
        self._actor.rch = StoredGym(answers)
        self._actor.set_tokenizer(tokenizer)
        self.run_rollouts = self

    def options(self, **_: Any) -> "LocalActor":
        """Return this handle: there is one way to run."""
        return self

    async def remote(self, *arguments: Any) -> AsyncIterator[Any]:
        """Stream the rollouts, each as an awaitable."""
        async for item in self._actor.run_rollouts(*arguments):
            yield _ready(item)


async def _ready(value: Any) -> Any:
    return value


def _numbered(answers: Sequence[Answer]) -> list[Answer]:
    return [answer | {"row": answer["row"] | {"_rowidx": place}} for place, answer in enumerate(answers)]


def load(combination: Sequence[str], folder: Path) -> Any:
    """Load a recipe as NeMo-RL's entry points do, and apply what they and ``setup`` check before GPUs are needed."""
    file = MAKE.write(folder, combination)[-1]
    values = OmegaConf.to_container(load_config(file), resolve=True)
    is_single = combination[0] == "sc"
    config = (SingleControllerConfig if is_single else MasterConfig)(**values)
    assert should_use_nemo_gym(config)
    ClippedPGLossFn(config.loss_fn)
    _create_advantage_estimator(config)
    _validate_use_kl_in_reward_compat(config)
    _resolve_logprob_skip_flags(config)
    if is_single:
        validate_single_controller_config(config)
    return config


class BatchCheck:
    """One file of answers, on its way through NeMo-RL.

    Args:
        config: the recipe's.
        answers: rows and results, all of them answered.
        tokenizer: the one that the engines had.
    """

    def __init__(self, config: Any, answers: Sequence[Answer], tokenizer: PreTrainedTokenizerFast) -> None:
        self._config, self._tokenizer = config, tokenizer
        self._answers = sorted(answers, key=lambda answer: answer["row"]["_rowidx"])
        self._samples = config.grpo.num_generations_per_prompt
        self._results = [answer["result"] for answer in self._answers]
        generation = {**config.policy["generation"], "stop_token_ids": None, "stop_strings": None}
        rows = [json.loads(json.dumps(answer["row"])) for answer in self._answers]
        self._rollout = {
            "policy_generation": SimpleNamespace(cfg=generation),
            "input_batch": BatchedDataDict({"extra_env_info": rows, "loss_multiplier": torch.ones(len(rows))}),
            "tokenizer": tokenizer,
            "task_to_env": {"nemo_gym": LocalActor(answers, tokenizer)},
            "generation_config": generation,
            "log_full_result_tables": False,
            "max_seq_len": config.policy["max_total_sequence_length"],
            "mask_env_flagged_samples": should_mask_flagged_samples(config.env),
        }

    def check_step(self) -> dict[str, int]:
        """Check a synchronous step: grouping, baseline, deviation, the filter, the masks and the batch."""
        got = run_nemo_gym_rollout_sync(**self._rollout)
        batch, rewards = got.final_batch, got.final_batch["total_reward"]
        grpo = self._config.grpo
        baseline, std = calculate_baseline_and_std_per_prompt(
            got.input_ids, rewards, torch.ones_like(rewards), leave_one_out_baseline=grpo.use_leave_one_out_baseline
        )
        self._check_groups(rewards, baseline, std)
        kept = list(range(len(self._results)))
        if grpo.use_dynamic_sampling:
            kept = [index for index in kept if self._is_informative(index // self._samples)]
            grpo.num_prompts_per_step = len(kept) // self._samples
            batch, is_complete, _, _ = dynamic_sampling(batch, std, baseline, 1, self._config, Timer())
            assert is_complete
            assert torch.equal(batch["filtered_reward"], rewards[kept])
        train = self._train_batch(batch)
        self._check_batch(train, kept)
        self._check_advantages(batch, train, kept)
        masked = self._check_masks(train, kept)
        return {"rows": len(self._results), "trained on": len(kept), "of these masked": masked}

    def check_async(self) -> dict[str, int]:
        """Check the asynchronous trainer's stream of groups, and the batch of each."""
        starts = range(0, len(self._results), self._samples)
        start_of = {tuple(_first_prompt(self._results[start])): start for start in starts}
        assert len(start_of) == len(starts)

        async def check_groups() -> None:
            async for group in run_async_nemo_gym_rollout(**self._rollout, num_generations=self._samples):
                (prompt,) = {tuple(log[0]["token_ids"].tolist()) for log in group.final_batch["message_log"]}
                start = start_of.pop(prompt)
                train = self._train_batch(group.final_batch)
                self._check_batch(train, range(start, start + self._samples))
                self._check_masks(train, range(start, start + self._samples))

        asyncio.run(check_groups())
        assert not start_of
        return {"groups": len(starts)}

    def check_single_controller(self) -> dict[str, int]:
        """Check what the SingleController makes of each prompt; it has no masks."""
        for start in range(0, len(self._results), self._samples):
            answers = self._answers[start : start + self._samples]
            rollouts = AsyncNemoGymRolloutImpl(
                tokenizer=self._tokenizer,
                task_to_env={"nemo_gym": LocalActor(_numbered(answers), self._tokenizer)},
                num_generations_per_prompt=self._samples,
                max_seq_len=self._config.policy["max_total_sequence_length"],
                max_rollout_turns=self._config.grpo.max_rollout_turns,
                generation_config=self._rollout["generation_config"],
            )
            sample = {"idx": 0, "message_log": [], "extra_env_info": answers[0]["row"], "task_name": "nemo_gym"}
            record = asyncio.run(rollouts.run_rollout(sample))
            train = record_to_train_batch(record, pad_value_dict={"token_ids": self._tokenizer.pad_token_id})
            self._check_batch(train, range(start, start + self._samples))
            assert torch.equal(train["sample_mask"], torch.ones(self._samples))
            assert len(train["prompt_ids_for_adv"].unique(dim=0)) == 1
        return {"groups": len(self._results) // self._samples}

    def _train_batch(self, batch: Any) -> Any:
        if self._config.grpo.overlong_filtering:
            batch["loss_multiplier"] = batch["loss_multiplier"] * ~batch["truncated"]
        _apply_mask_sample_filter(batch)
        add_grpo_token_loss_masks_and_generation_logprobs(batch["message_log"])
        flat, lengths = batched_message_log_to_flat_message(
            batch["message_log"],
            pad_value_dict={"token_ids": self._tokenizer.pad_token_id},
            make_sequence_length_divisible_by=self._config.policy["make_sequence_length_divisible_by"],
        )
        return _build_async_grpo_train_data(flat, lengths, batch, self._config.policy)

    def _check_groups(self, rewards: torch.Tensor, baseline: torch.Tensor, std: torch.Tensor) -> None:
        """Compare with the groups of the rows: NeMo-RL groups by the first prompt's tokens."""
        leaves_one_out = self._config.grpo.use_leave_one_out_baseline
        for start in range(0, len(rewards), self._samples):
            group = rewards[start : start + self._samples]
            others = group.sum() - (group if leaves_one_out else 0)
            wanted = others / (self._samples - int(leaves_one_out)) * torch.ones_like(group)
            assert torch.allclose(baseline[start : start + self._samples], wanted, atol=1e-6)
            if not leaves_one_out:
                informative = std[start : start + self._samples] != 0
                assert (
                    bool(informative.all()) == bool(informative.any()) == self._is_informative(start // self._samples)
                )

    def _is_informative(self, group: int) -> bool:
        members = self._results[group * self._samples : (group + 1) * self._samples]
        return len({result["reward"] for result in members}) > 1

    def _check_batch(self, train: Any, kept: Sequence[int]) -> None:
        """Compare every token, its loss mask and its log-prob with the answers."""
        for place, index in enumerate(kept):
            ids, mask, logprobs = _flat(self._results[index])
            length = int(train["input_lengths"][place])
            assert train["input_ids"][place][:length].tolist() == ids
            assert train["token_mask"][place].sum() == sum(mask)
            assert train["token_mask"][place][:length].tolist() == mask
            assert torch.allclose(train["generation_logprobs"][place][:length], torch.tensor(logprobs))

    def _check_masks(self, train: Any, kept: Sequence[int]) -> int:
        """Compare which rows have no loss; return their number."""
        masked = [bool(self._results[index]["mask_sample"]) for index in kept]
        assert (train["sample_mask"] == 0).tolist() == masked
        return sum(masked)

    def _check_advantages(self, batch: Any, train: Any, kept: Sequence[int]) -> None:
        prompts, _ = batched_message_log_to_flat_message(
            extract_initial_prompt_messages(batch["message_log"], batch["length"]),
            pad_value_dict={"token_ids": self._tokenizer.pad_token_id},
        )
        rewards = torch.tensor([self._results[index]["reward"] for index in kept])
        estimator = _create_advantage_estimator(self._config)
        advantages = estimator.compute_advantage(prompts["token_ids"], rewards, train["token_mask"])
        for start in range(0, len(kept), self._samples):
            distance = rewards[start : start + self._samples] - rewards[start : start + self._samples].mean()
            got = advantages[start : start + self._samples, 0]
            is_off = distance.abs() > 1e-6
            assert torch.equal(got[is_off] > 0, distance[is_off] > 0)
            assert (got[~is_off].abs() < 1e-3).all()  # failed members stand at the mean of the others


def _flat(result: dict[str, Any]) -> tuple[list[int], list[int], list[float]]:
    """Return ids, loss mask and log-probs of an answer of ``/run``."""
    ids: list[int] = []
    mask: list[int] = []
    logprobs: list[float] = []
    for item in result["response"]["output"]:
        if sampled := item.get("generation_token_ids"):
            new = item["prompt_token_ids"][len(ids) :]
            ids += [*new, *sampled]
            mask += [0] * len(new) + [1] * len(sampled)
            logprobs += [0.0] * len(new) + item["generation_log_probs"]
    return ids, mask, logprobs


def _first_prompt(result: dict[str, Any]) -> list[int]:
    return next(item for item in result["response"]["output"] if item.get("generation_token_ids"))["prompt_token_ids"]


def whole_groups(answers: Sequence[Answer], config: Any) -> list[Answer]:
    """Return the answers of the groups of which every row was answered."""
    groups: dict[int, list[Answer]] = {}
    for answer in answers:
        if "result" in answer:
            groups.setdefault(answer["row"]["_rowidx"] // config.grpo.num_generations_per_prompt, []).append(answer)
    whole = [group for _, group in sorted(groups.items()) if len(group) == config.grpo.num_generations_per_prompt]
    return _numbered([one for group in whole for one in sorted(group, key=lambda one: one["row"]["_rowidx"])])


def small_tokenizer() -> PreTrainedTokenizerFast:
    """Return the tokenizer that the engines had."""
    folder = FOLDER.parents[1] / "prorl_gym/oracle/tokenizer"
    return PreTrainedTokenizerFast.from_pretrained(folder)


def main(files: Sequence[Path]) -> None:
    """Check all recipes and the files, and print a line for each as rows of a table."""
    register_omegaconf_resolvers()
    commit = subprocess.run(["git", "-C", CHECKOUT, "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
    print(f"NeMo-RL {commit.stdout.strip()}, torch {torch.__version__}")
    with tempfile.TemporaryDirectory() as scratch:
        combinations = list(product(MAKE.ALGORITHMS, MAKE.DOMAINS, MAKE.SIZES))
        configs = {MAKE.recipe_name(*one): load(one, Path(scratch)) for one in combinations}
        print(f"{len(configs)} recipes load and pass NeMo-RL's checks")
        for file in files:
            name = file.name.split(".")[0]
            algorithm = next(key for key in MAKE.ALGORITHMS if name.startswith(f"{key}_"))
            answers = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
            check = BatchCheck(configs[name], whole_groups(answers, configs[name]), small_tokenizer())
            checks = {"async_grpo": check.check_async, "sc": check.check_single_controller}
            found = checks.get(algorithm, check.check_step)()
            if refused := [answer["status"] for answer in answers if "status" in answer]:
                assert all(map(http_status_is_infra, refused))  # NeMo-RL dispatches these rows again
                found["refused rows"] = len(refused)
            print(f"{name}: " + ", ".join(f"{count} {what}" for what, count in found.items()))


if __name__ == "__main__":
    main([Path(argument) for argument in sys.argv[1:]])
