"""One file with every rollout of a result: what the engine saw, what the policy sampled, token by token."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, cast

Decode = Callable[[Sequence[int]], str]

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"

_HEAD = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>prorl-gym rollouts</title>
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<style>
body { font: 15px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem; color: #1c2024; }
h1 { font-size: 1.3rem; } details { border: 1px solid #d9dce1; border-radius: 6px; margin: .5rem 0; }
summary { cursor: pointer; padding: .4rem .8rem; } .facts { color: #667; margin-left: .6rem; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; margin: 0; padding: .8rem; border-top: 1px solid #d9dce1;
      font: 13px/1.55 ui-monospace, monospace; }
.given { color: #667; } .sampled { background: #dff3e4; } .sampled:hover { outline: 1px solid #2a7a43; }
.good { color: #1b7a3d; } .bad { color: #a33; } .masked { color: #96690a; }
@media (prefers-color-scheme: dark) {
  body { background: #14161a; color: #dcdfe4; } details, pre { border-color: #343a42; }
  .sampled { background: #143d24; } .given, .facts { color: #939aa5; }
  .good { color: #5fce86; } .bad { color: #f08a8a; }
}
</style></head><body>
<h1>Rollouts</h1>
<p>Grey: prompts and observations (mask 0). <span class="sampled">Green</span>: tokens that the policy sampled
(mask 1); hover for the id and its log-prob.</p>
"""


@dataclass(frozen=True, slots=True)
class _Run:
    """Consecutive tokens of one mask value."""

    sampled: bool
    token_ids: Sequence[int]
    logprobs: Sequence[float]


def render(results: Sequence[Mapping[str, Any]], decode: Decode) -> str:
    """Return the page.

    Args:
        results: ``/run`` answers, as they stand in a results file.
        decode: token ids to text, special tokens shown.
    """
    return _HEAD + "\n".join(_rollout(result, decode) for result in results) + "\n</body></html>\n"


def _rollout(result: Mapping[str, Any], decode: Decode) -> str:
    masked = bool(result.get("mask_sample"))
    reward = result.get("reward")
    mood = "masked" if masked else "good" if isinstance(reward, int | float) and reward > 0 else "bad"
    verdict = f"masked ({result.get('failure_kind')})" if masked else f"reward {reward}"
    task: Any = result.get("task")
    name = cast(Mapping[str, Any], task).get("id") if isinstance(task, Mapping) else None
    title = f"{result.get('environment', '?')} / {name or result.get('_ng_task_index', '?')}"
    facts = (
        f"{result.get('prorl_outcome', '')}, {result.get('prorl_turns', '?')} turns, "
        f"{result.get('prorl_sampled_tokens', '?')} tokens sampled"
    )
    body = "".join(_run(run, decode) for run in _runs(result))
    return (
        f'<details><summary>{escape(str(title))} <b class="{mood}">{escape(str(verdict))}</b>'
        f'<span class="facts">{escape(facts)}</span></summary><pre>{body}</pre></details>'
    )


def _runs(result: Mapping[str, Any]) -> Iterator[_Run]:
    """Rebuild the flat sequence from the triples, the way a trainer does."""
    seen = 0
    for item in result.get("response", {}).get("output", ()):
        sampled = item.get("generation_token_ids")
        if sampled:
            prompt = item["prompt_token_ids"]
            yield _Run(False, prompt[seen:], [])
            yield _Run(True, sampled, item["generation_log_probs"])
            seen = len(prompt) + len(sampled)


def _run(run: _Run, decode: Decode) -> str:
    if not run.sampled:
        return f'<span class="given">{escape(decode(run.token_ids))}</span>'
    return "".join(
        f'<span class="sampled" title="{escape(label)}">{escape(text)}</span>' for text, label in _tokens(run, decode)
    )


def _tokens(run: _Run, decode: Decode) -> Iterator[tuple[str, str]]:
    """Yield text and label of each sampled token; tokens that share a character are shown together."""
    pending: list[int] = []
    labels: list[str] = []
    for position, (token, logprob) in enumerate(zip(run.token_ids, run.logprobs, strict=True)):
        pending.append(token)
        labels.append(f"{token} ({logprob:.3f})")
        text = decode(pending)
        whole = not text.endswith(_REPLACEMENT) or len(pending) == 4 or position == len(run.token_ids) - 1
        if whole:
            yield text, ", ".join(labels)
            pending, labels = [], []
