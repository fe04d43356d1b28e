"""What token continuity costs the client, and how often tokens would drift without it.

CPU: rollouts of 100 turns and 64,000 tokens through the real session and vLLM's wire (``_token_rollout.py``), beside
rendering and encoding the whole history again in every turn. Drift: 10,000 random conversations for each template
(``_token_drift.py``). The real tokenizer is named by the environment variable ``PRORL_GYM_QWEN`` or by ``--tokenizer``;
without it the small one of this package is measured, which the report says. Texts are made of the licence's words.
"""

import json
from pathlib import Path
from statistics import median

from _report import Figure, Report, StartConditions, figure, peer, report
from _token_drift import Count, count_drift
from _token_models import Model, load_models, tokenizer_directory
from _token_rollout import TURNS, Cost, rendered_again, rollout

ROLLOUTS = 7
CONVERSATIONS = 10_000
EARLY, LATE = range(5, 15), range(90, 100)
"""Turns around the 10th and the 100th, counted from 0."""
_SEED = 20261120
_ROOT = Path(__file__).parent.parent


def run() -> Report:
    """Measure."""
    begun = StartConditions.capture()
    text = (_ROOT / "LICENSE").read_text(encoding="utf-8")  # English that never changes and spells no control token
    known = load_models()
    figures = [row for model in known for row in _cpu(model, text)]
    words = text.split()
    figures += [_drift(model, count_drift(model, CONVERSATIONS, words, _SEED)) for model in known]
    name = (
        "the small one of this package"
        if tokenizer_directory() is None
        else "Qwen's; for the llama style with other control tokens"
    )
    return report("tokens", figures, "transformers", "tokenizers", begun=begun, also={"tokenizer": name})


def _cpu(model: Model, text: str) -> list[Figure]:
    """Turns late in a rollout against early ones, and whole rollouts."""
    rollout(model, text, _SEED)  # the first one pays for imports and caches
    costs = [rollout(model, text, _SEED + number) for number in range(ROLLOUTS)]
    again = rendered_again(model, text, _SEED, range(TURNS))
    early, late = _middle(again, EARLY), _middle(again, LATE)
    growth = peer("rendering again", [late / early])
    return [
        figure(
            f"{model.name}: turn 100 against turn 10",
            [_around(cost, LATE) / _around(cost, EARLY) for cost in costs],
            "x",
            better="lower",
            target=1.3,
            peers=[growth],
        ),
        figure(
            f"{model.name}: client CPU of turn 100",
            [_around(cost, LATE) * 1000 for cost in costs],
            "ms",
            better="lower",
            peers=[peer("rendering again", [late * 1000])],
        ),
        figure(
            f"{model.name}: client CPU of a rollout, 100 turns, 64 k tokens",
            [cost.total * 1000 for cost in costs],
            "ms",
            better="lower",
            target=300.0,
            peers=[peer("rendering again", [sum(again.values()) * 1000])],
        ),
    ]


def _drift(model: Model, count: Count) -> Figure:
    return figure(
        f"{model.name}: drifted, of {count.conversations} conversations",
        [100 * count.drifted / count.conversations],
        "%",
        better="lower",
        target=0.0,
        peers=[
            peer("rendering again, random ids", [100 * count.random_again / count.random]),
            peer("rendering again, canonical ids", [100 * count.canonical_again / count.canonical]),
        ],
    )


def _around(cost: Cost, turns: range) -> float:
    return median(cost.turns[turn] for turn in turns)


def _middle(costs: dict[int, float], turns: range) -> float:
    return median(costs[turn] for turn in turns)


if __name__ == "__main__":
    print(json.dumps(run(), indent=2))
