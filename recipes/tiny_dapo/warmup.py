"""Warm-up: supervised learning of traces whose mode is wrong and whose right branch can be executed.

Reinforcement learning needs a policy that sometimes succeeds. It starts from one whose greedy answer is wrong, so that
what it gains cannot come from the warm-up.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from model import TINY, Decoder, Shape, padded, token_logprobs
from sampler import Call, Sampler
from tasks import Question, TurnEncoder, questions, trace

BATCH, STEPS, FURTHER, RISE = 64, 220, 60, 40
SAMPLED_AT_LEAST, GREEDY_AT_MOST = 0.18, 0.05


class WarmupError(Exception):
    """The warm-up did not produce a policy to start from."""


@dataclass(frozen=True, slots=True)
class WarmPolicy:
    """A policy to start from."""

    model: Decoder
    sampled: float
    greedy: float
    steps: int


class Muon(torch.optim.Optimizer):
    """Momentum whose direction is made orthogonal (Jordan et al. 2024, "Muon"); half as many steps as AdamW here.

    In float32: the one that torch brings computes in bfloat16, which is slow on CPUs.

    Args:
        matrices: parameters of two dimensions.
        lr: step size.
    """

    def __init__(self, matrices: Sequence[torch.Tensor], lr: float) -> None:
        super().__init__(matrices, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Update the matrices."""
        for group in self.param_groups:
            for matrix in group["params"]:
                momentum = self.state[matrix].setdefault("momentum", torch.zeros_like(matrix))
                momentum.lerp_(matrix.grad, 0.05)
                direction = orthogonal(matrix.grad.lerp(momentum, 0.95))
                rows, columns = matrix.shape
                matrix.add_(direction, alpha=-group["lr"] * max(1.0, rows / columns) ** 0.5)


def orthogonal(matrix: torch.Tensor) -> torch.Tensor:
    """Return about the nearest matrix whose singular values are 1, by Newton-Schulz iterations of fifth order."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    x = x / (x.norm() + 1e-7)
    for _ in range(5):
        square = x @ x.T
        x = a * x + (b * square + c * square @ square) @ x
    return x.T if matrix.shape[0] > matrix.shape[1] else x


def warm_up(domain: type[Question], language: TurnEncoder, seed: int, shape: Shape = TINY) -> WarmPolicy:
    """Train a fresh decoder until it passes the gate.

    Raises:
        WarmupError: it does not, after three further rounds.
    """
    model = Decoder(language.vocab_size, seed, shape)
    matrices = [p for block in model.blocks for p in block.parameters() if p.dim() == 2]
    inside = {id(p) for p in matrices}
    others = [p for p in model.parameters() if id(p) not in inside]
    optimizers = [
        Muon(matrices, lr=0.02),
        torch.optim.AdamW(others, lr=3e-3, betas=(0.9, 0.98), weight_decay=0.0),
    ]
    bases = [optimizer.param_groups[0]["lr"] for optimizer in optimizers]
    rng, asked = random.Random(f"warm-up {seed}"), questions(domain, seed)
    steps, sampled, greedy, loss = 0, 0.0, 1.0, torch.zeros(())
    for length in (STEPS, FURTHER, FURTHER, FURTHER):
        for step in range(length):
            share = (0.05 + 0.95 * (1 + math.cos(math.pi * step / length)) / 2) * (1.0 if length == STEPS else 0.3)
            for optimizer, base in zip(optimizers, bases, strict=True):
                optimizer.param_groups[0]["lr"] = base * share * min(1.0, (steps + 1) / RISE)
                optimizer.zero_grad()
            traces = [trace(language, question, rng) for question in islice(asked, BATCH)]
            mask = padded([row for _, row in traces], torch.float32)
            loss = -(token_logprobs(model, padded([ids for ids, _ in traces])) * mask).sum() / mask.sum()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for optimizer in optimizers:
                optimizer.step()
            steps += 1
        probe = list(islice(asked, 512))
        sampled, greedy = accuracy(model, language, probe, 1.0), accuracy(model, language, probe[:256], 0.0)
        print(f"warm-up: {steps} steps, loss {loss.item():.4f}, sampled {sampled:.3f}, greedy {greedy:.3f}", flush=True)
        if sampled >= SAMPLED_AT_LEAST and greedy <= GREEDY_AT_MOST:
            # In float32, batches of another shape differ by up to 6e-5 nats at a rare token: too near to the bound.
            return WarmPolicy(model.double(), sampled, greedy, steps)
    raise WarmupError(
        f"warm-up gate: sampled {sampled:.3f} (at least {SAMPLED_AT_LEAST}), greedy {greedy:.3f} "
        f"(at most {GREEDY_AT_MOST}) after {steps} steps"
    )


def accuracy(model: Decoder, language: TurnEncoder, asked: Sequence[Question], temperature: float) -> float:
    """Return the share of questions solved, with tools computed here: quick, and good enough for the gate."""
    sampler = Sampler(model)
    histories = {place: language.prompt(question) for place, question in enumerate(asked)}
    said: list[list[str]] = [[] for _ in asked]
    right = 0
    for turn in range(asked[0].turns):
        calls = {
            place: Call(
                ids=list(ids),
                max_tokens=asked[place].turn_tokens,
                stops=frozenset({language.end}),
                temperature=temperature,
                random=random.Random(f"{place} {turn}"),
            )
            for place, ids in histories.items()
        }
        for call in calls.values():
            sampler.submit(call)
        histories = {}
        for place, call in calls.items():
            *ids, last = call.result.result().sampled
            if last != language.end:
                continue
            said[place].append(language.decode(ids))
            answer = asked[place].respond(said[place])
            if isinstance(answer, str):
                histories[place] = [*call.ids, *language.result(answer)]
            else:
                right += answer
    sampler.close()
    return right / len(asked)
