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
table { border-collapse: collapse; } td { padding: .1rem 1rem .1rem 0; } a { color: inherit; }
#failed:checked ~ .is-good, #failed:checked ~ table .is-good { display: none; }
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

_FILTER = '<input type="checkbox" id="failed"> <label for="failed">only those without a reward above 0</label>\n'


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
    ordered = sorted(results, key=_place)
    index = "\n".join(_index_row(number, result) for number, result in enumerate(ordered))
    rollouts = "\n".join(_rollout(number, result, decode) for number, result in enumerate(ordered))
    return f"{_HEAD}{_FILTER}<table>{index}</table>\n{rollouts}\n</body></html>\n"


def _place(result: Mapping[str, Any]) -> tuple[float, float]:
    """Order by task, then by repeat; results stand in the file in the order in which they finished."""
    task, repeat = (result.get(f"_ng_{name}_index") for name in ("task", "rollout"))
    return (_number(task), _number(repeat))


def _number(value: Any) -> float:
    return value if isinstance(value, int | float) else float("inf")


def _index_row(number: int, result: Mapping[str, Any]) -> str:
    mood, verdict = _verdict(result)
    outcome = escape(str(result.get("prorl_outcome", "")))
    return (
        f'<tr class="is-{mood}"><td><a href="#r{number}">{escape(_title(result))}</a></td>'
        f'<td class="{mood}">{escape(verdict)}</td><td>{outcome}</td></tr>'
    )


def _verdict(result: Mapping[str, Any]) -> tuple[str, str]:
    """Return the mood, which is a class of the style sheet, and the words."""
    if result.get("mask_sample"):
        return "masked", f"masked ({result.get('failure_kind')})"
    reward = result.get("reward")
    return "good" if isinstance(reward, int | float) and reward > 0 else "bad", f"reward {reward}"


def _title(result: Mapping[str, Any]) -> str:
    task: Any = result.get("task")
    name = cast(Mapping[str, Any], task).get("id") if isinstance(task, Mapping) else None
    repeat = result.get("_ng_rollout_index")
    title = f"{result.get('environment', '?')} / {name or result.get('_ng_task_index', '?')}"
    return title if repeat is None else f"{title} #{repeat}"


def _rollout(number: int, result: Mapping[str, Any], decode: Decode) -> str:
    mood, verdict = _verdict(result)
    turns = result.get("prorl_turns", "?")
    facts = (
        f"{result.get('prorl_outcome', '')}, {turns} turn{'' if turns == 1 else 's'}, "
        f"{result.get('prorl_sampled_tokens', '?')} tokens sampled"
    )
    body = "".join(_run(run, decode) for run in _runs(result))
    return (
        f'<details id="r{number}" class="is-{mood}"><summary>{escape(_title(result))} '
        f'<b class="{mood}">{escape(verdict)}</b>'
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
