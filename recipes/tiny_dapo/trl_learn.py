"""TRL's ``GRPOTrainer`` learns the recipe's task: ``python trl_learn.py --service PATH/TO/prorl-gym``.

TRL has the model, the optimizer and the loss. Rollouts come from the service by the launcher of
``recipes/trainers/trl_grpo.py`` and ``to_trl``. After each step the new weights go to the engine over HTTP, before the
next rollouts: without a vLLM of its own, TRL takes what it trains on for samples of its current weights.
"""

import asyncio
import io
import os
import sys
import tempfile
import urllib.request
from collections import Counter
from itertools import islice
from pathlib import Path
from statistics import fmean
from time import monotonic, process_time
from typing import Any

import torch
from datasets import Dataset
from evaluate import accuracy
from learn import HERE, say
from model import Decoder, token_logprobs
from stack import Stack, script_parser, stack, start_weights, write_report
from tasks import Sum, held_out, questions
from train import CLIP_HIGH, CLIP_LOW, GROUP_SIZE, LEARNING_RATE, MAX_MISMATCH
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerFast
from transformers.modeling_outputs import BaseModelOutput, CausalLMOutput
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer

from prorl_gym.records import Rollout
from prorl_gym.trainers.trl import served_reward, to_trl

sys.path.append(str(HERE.parent / "trainers"))
from trl_grpo import roll_out

GROUPS = 12
"""Prompts of a step. TRL drops none: a group without a signal has no gradient, and counts in the mean over tokens."""


class TinyConfig(PretrainedConfig):
    """What ``transformers`` wants to know of the decoder."""

    model_type = "tiny_dapo"
    vocab_size: int = 0


class Backbone(torch.nn.Module):
    """The decoder without its head.

    Args:
        decoder: trained in place.
    """

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, **_: Any) -> BaseModelOutput:
        """Return hidden states. Rows are padded on both sides, and the decoder knows padding on the right only."""
        length = input_ids.shape[1]
        places, pads = torch.arange(length)[None], (attention_mask.cumsum(1) == 0).sum(1, keepdim=True)
        hidden = self.decoder.hidden(input_ids.gather(1, (places + pads).clamp(max=length - 1)))
        back = (places - pads).clamp(min=0)[..., None].expand(-1, -1, hidden.shape[-1])
        return BaseModelOutput(last_hidden_state=hidden.gather(1, back))


class TinyModel(PreTrainedModel):
    """The recipe's decoder as ``transformers`` and TRL call a model.

    Args:
        config: with the size of the vocabulary.
        decoder: trained in place.
    """

    config_class = TinyConfig
    base_model_prefix = "backbone"

    def __init__(self, config: TinyConfig, decoder: Decoder) -> None:
        super().__init__(config)
        self.backbone = Backbone(decoder)
        self.generation_config = GenerationConfig()
        self.post_init()

    def _init_weights(self, module: torch.nn.Module) -> None:
        """Leave the decoder as it is."""

    def get_output_embeddings(self) -> torch.nn.Module:
        """Return the head."""
        return self.backbone.decoder.head

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, logits_to_keep: int = 0, **_: Any
    ) -> CausalLMOutput:
        """Return the logits of the last tokens."""
        hidden = self.backbone(input_ids, attention_mask).last_hidden_state
        return CausalLMOutput(logits=self.get_output_embeddings()(hidden[:, -logits_to_keep:]))


class Publisher:
    """Gives the engine TRL's weights whenever they have changed.

    Args:
        running: service and engine.
        decoder: whose weights.
    """

    def __init__(self, running: Stack, decoder: Decoder) -> None:
        self._running, self._decoder, self._step = running, decoder, -1

    def publish(self, step: int) -> None:
        """Load the weights of this step, unless the engine has them."""
        if step == self._step:
            return
        saved = io.BytesIO()
        torch.save(self._decoder.state_dict(), saved)
        with self._running.sync_client() as client:
            with torch.inference_mode():
                probe = token_logprobs(self._decoder, torch.tensor([client.policy().probe_ids]))[0, 1:]
            with client.weight_update(reference=probe.tolist()) as update:
                address = f"{self._running.engine}/load_weights?version={update.version}"
                urllib.request.urlopen(urllib.request.Request(address, saved.getvalue()), timeout=60).close()
        self._step = step


class Measured(GRPOTrainer):
    """Compares TRL's own log-probs with those that the engine served, token by token, before it trains on them."""

    rollouts: list[Rollout]
    mismatches: list[float]

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        batch = super()._generate_and_score_completions(inputs)
        carries_loss = (batch["completion_mask"] * batch["tool_mask"]).bool()
        served = torch.zeros_like(batch["old_per_token_logps"])
        for row, logprobs in enumerate(to_trl(self.rollouts, placeholder_id=0)["logprobs"]):
            served[row, : len(logprobs)] = torch.tensor(logprobs, dtype=served.dtype)[:, 0]
        difference = (batch["old_per_token_logps"] - served)[carries_loss].abs()
        self.mismatches.append(float(difference.max()))
        return batch


def train(running: Stack, decoder: Decoder, work: Path, steps: int, seed: int) -> dict[str, Any]:
    """Let TRL train; return what each step saw."""
    asked = list(islice(questions(Sum, seed), GROUPS * steps))
    rows = {str(n): {"environment": "math", "task": one.row} for n, one in enumerate(asked)}
    publisher, seen, ends = Publisher(running, decoder), list[dict[str, Any]](), Counter[str]()

    def rollout_func(prompts: list[str], trainer: Any) -> dict[str, list[Any]]:
        started = monotonic()
        publisher.publish(trainer.state.global_step)
        rollouts = roll_out(rows, prompts, trainer.num_generations)
        rewards = [one.reward for one in rollouts if one.reward is not None]
        ends.update(one.outcome.status for one in rollouts)
        seen.append(
            {"reward": fmean(rewards), "unscored": len(rollouts) - len(rewards), "waited": monotonic() - started}
        )
        say(f"step {len(seen)}: reward {seen[-1]['reward']:.2f}, {seen[-1]['waited']:.1f} s waiting")
        trainer.rollouts = rollouts
        return to_trl(rollouts, placeholder_id=trainer.processing_class.eos_token_id)

    batch: dict[str, Any] = {"num_generations": GROUP_SIZE, "per_device_train_batch_size": GROUPS * GROUP_SIZE // 2}
    loss: dict[str, Any] = {"loss_type": "dapo", "beta": 0.0, "epsilon": CLIP_LOW, "epsilon_high": CLIP_HIGH}
    optimizer: dict[str, Any] = {"learning_rate": LEARNING_RATE, "adam_beta1": 0.9, "adam_beta2": 0.95}
    plain: dict[str, Any] = {"use_cpu": True, "bf16": False, "gradient_checkpointing": False, "save_strategy": "no"}
    trainer = Measured(
        model=TinyModel(TinyConfig(vocab_size=running.language.vocab_size), decoder),
        processing_class=PreTrainedTokenizerFast.from_pretrained(work / "tokenizer"),
        args=GRPOConfig(
            str(work / "trl"),
            steps_per_generation=2,  # two minibatches
            max_steps=2 * steps,
            lr_scheduler_type="constant",
            shuffle_dataset=False,
            report_to=[],
            seed=seed,
            **batch,
            **loss,
            **optimizer,
            **plain,
        ),
        train_dataset=Dataset.from_list([{"prompt": number} for number in rows]),
        rollout_func=rollout_func,
        reward_funcs=served_reward,
    )
    trainer.rollouts, trainer.mismatches = [], []
    trainer.train()
    publisher.publish(trainer.state.global_step)
    return {
        "steps": [one | {"mismatch": gap} for one, gap in zip(seen, trainer.mismatches, strict=True)],
        "ends": dict(ends),
    }


async def evaluate(running: Stack, name: str, count: int) -> dict[str, float]:
    """Return greedy and sampled accuracy on held-out questions."""
    async with running.client() as client:
        return {
            "greedy": await accuracy(client, f"greedy-{name}", held_out(Sum, count), 0.0),
            "sampled": await accuracy(client, f"sampled-{name}", held_out(Sum, count), 1.0),
        }


def main() -> None:
    """Train once and write the report."""
    parser = script_parser(__doc__, Path("results/tiny_trl"), updates=24, questions=128)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    started = monotonic()
    with (
        tempfile.TemporaryDirectory(prefix="prorl-trl-") as work,
        stack(arguments.service, Path(work), arguments.out) as running,
    ):
        os.environ |= {"PRORL_GYM_URL": running.service, "PRORL_GYM_TOKEN": running.token}  # for the launcher
        decoder = start_weights(running.language, arguments.seed, arguments.out / f"warm-{arguments.seed}.pt")
        Publisher(running, decoder).publish(-2)
        before = asyncio.run(evaluate(running, "before", arguments.questions))
        say(f"before: {before}")
        found = train(running, decoder, Path(work), arguments.updates, arguments.seed)
        after = asyncio.run(evaluate(running, "after", arguments.questions))
    report = {
        "seed": arguments.seed,
        "questions": arguments.questions,
        "before": before,
        "after": after,
        "largest_mismatch": max(step["mismatch"] for step in found["steps"]),
        "rollouts": GROUPS * GROUP_SIZE * arguments.updates,
        "unscored": sum(step["unscored"] for step in found["steps"]),
        "seconds": round(monotonic() - started),
        "trainer_cpu_seconds": round(process_time()),
        **found,
    }
    write_report(arguments.out / "report.json", report)
    problem = report["largest_mismatch"] > MAX_MISMATCH
    say(
        f"trl: {'FAIL mismatch' if problem else 'done'}: {before} -> {after}, mismatch {report['largest_mismatch']:.1g}"
    )
    sys.exit(problem)


if __name__ == "__main__":
    main()
