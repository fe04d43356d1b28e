"""Checks of what engines answer, for all dialects.

An engine's answer is untrusted. Everything from which a trainer would silently learn garbage is refused here as
``ENGINE_CONTRACT``, with the address and what to change on the server.
"""

import json
import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, cast

from prorl_gym.errors import EngineError, FailureKind
from prorl_gym.inference.protocol import GenerationRequest
from prorl_gym.inference.strict_json import STRICT_JSON, is_too_deep

FinishReason = Literal["stop", "length", "abort"]

JsonObject = Mapping[str, object]

_HIGHEST_LOGPROB = 1e-3
"""A log-probability cannot be positive, except for rounding in an engine's arithmetic."""

_LOWEST_LOGPROB = -1000.0
"""No token is sampled with less than e**-104, the least float32; raw log-probs are lower by the temperature. Engines
write -9999 (vLLM), -1e9 or the lowest float32 for minus infinity."""

_CONTEXT_SLACK = 8
"""Tokens by which servers end a call before their context is full: SGLang keeps one or two free."""

_LARGEST_VERSION = 10**15 - 1
_VERSION = re.compile(r"(?:[A-Za-z]+[-_:]?)?([0-9]{1,15})")


class PrematureLengthStop(EngineError):
    """A call ended at ``length`` before its limit, and not at the engine's context either, if that is known."""

    def __init__(self, what: str, fix: str) -> None:
        super().__init__(FailureKind.ENGINE_CONTRACT, what, fix)


@dataclass(frozen=True, slots=True)
class AnsweredCall:
    """A call that was answered, as far as its request does not say."""

    engine: str
    version: int
    """Policy version that the pool had set when the call was made."""
    seconds: float
    context_length: int | None = None
    """Context of the engine in tokens, if known."""
    is_trial: bool = False
    """It was a trial of whether the engine samples."""
    is_prompt_checked: bool = False
    """An echo of the prompt was there, and is what was sent."""


@dataclass(frozen=True, slots=True)
class ResponseValidator:
    address: str
    vocab_size: int
    """Ids at or above it are refused."""
    server_kind: str
    fix: str
    model: str = ""
    control_ids: frozenset[int] = frozenset()
    """Control tokens of the vocabulary: a model may end its turn with one that was not named as a stop id."""

    def contract_error(self, what: str, fix: str = "") -> EngineError:
        return EngineError(FailureKind.ENGINE_CONTRACT, f"engine {self.address}: {what}.", fix or self.fix)

    def parse_object(self, payload: bytes) -> JsonObject:
        """Parse an answer: strict JSON, an object."""
        try:
            answer: object = STRICT_JSON.decode(payload.decode())
        except (ValueError, RecursionError):
            raise self.contract_error(
                "the answer is not JSON", f"Check that 'engines' names {self.server_kind} and not something before it."
            ) from None
        return self.require_object(answer, "the answer")

    def require_object(self, value: object, what: str) -> JsonObject:
        if not isinstance(value, dict):
            raise self.contract_error(f"{what} is not an object")
        return cast("dict[str, object]", value)

    def require_array(self, value: object, what: str) -> Sequence[object]:
        if not isinstance(value, list):
            raise self.contract_error(f"{what} is not a list")
        return cast("list[object]", value)

    def only_choice(self, answer: JsonObject) -> JsonObject:
        choices = answer.get("choices")
        if not isinstance(choices, list) or len(cast("list[object]", choices)) != 1:
            raise self.contract_error("did not answer with exactly one choice")
        return self.require_object(cast("list[object]", choices)[0], "its choice")

    def translate_finish_reason(self, value: object, known: Mapping[str, FinishReason]) -> FinishReason:
        if not isinstance(value, str) or value not in known:
            raise self.contract_error(f"ended with finish_reason {short_repr(value)}, which is not known")
        return known[value]

    def check_model_name(self, value: object, aliases: Collection[str] = ()) -> None:
        """Check the name of the model that answered, if there is one."""
        if isinstance(value, str) and value != self.model and value not in aliases:
            raise self.contract_error(
                f"answered with the model '{printable(value[:80])}', '{self.model}' was requested",
                "Check that 'engines' and 'model' belong together, and any proxy before the server.",
            )

    def check_sampled_ids(
        self,
        value: object,
        where: str,
        request: GenerationRequest,
        finish: FinishReason,
        answered: AnsweredCall,
        *,
        stopped_by_guard: bool = False,
    ) -> list[int]:
        """Check sampled ids: inside the vocabulary, and ending where the request requires it.

        ``stopped_by_guard``: the engine reports that no stop token ended the turn but a guard against repetition.
        Raises ``PrematureLengthStop``: ``length``, and neither the limit of the call nor the context is used up;
        ``EngineError`` (``ENGINE_CONTRACT``).
        """
        ids = self.check_ids(value, where)
        if not ids and finish != "abort":
            raise self.contract_error("sampled no token at all")
        if answered.is_trial:
            return ids
        if len(ids) > request.max_tokens:
            raise self.contract_error(f"sampled {len(ids)} tokens, {request.max_tokens} were requested")
        stops = frozenset(request.stop_token_ids)
        passed = next((token for token in ids[:-1] if token in stops), None)
        if passed is not None:
            raise self.contract_error(f"sampled on after the stop token {passed}")
        if finish == "stop" and stops and not stopped_by_guard and ids[-1] not in stops | self.control_ids:
            raise self.contract_error(f"stopped at token {ids[-1]}, which is no stop token")
        length, context = len(request.prompt_ids) + len(ids), answered.context_length
        missing = request.max_tokens - len(ids) if finish == "length" else 0
        if missing and (context is None or length < context - _CONTEXT_SLACK):
            raise PrematureLengthStop(
                f"engine {self.address}: ended a call at 'length' {missing} tokens before its limit"
                f"{'' if context is None else f', at {length} of {context} tokens of context'}.",
                "Remove its own limit on new tokens, or set 'max_turn_tokens' (and 'max_model_len') to what it allows.",
            )
        return ids

    def check_ids(self, value: object, where: str) -> list[int]:
        ids = self.require_array(value, where)
        for token in ids:
            if type(token) is not int:  # a bool is an int, and True is not the token 1
                raise self.contract_error(f"{where} has {short_repr(token)}, which is no token id")
            if not 0 <= token < self.vocab_size:
                raise self.contract_error(
                    f"{where} has the id {short_repr(token)}, outside of 0..{self.vocab_size - 1}",
                    "Check that 'tokenizer' belongs to the model; 'vocab_size' widens the range for padded models.",
                )
        return cast("list[int]", ids)

    def check_logprobs(self, values: Sequence[object], count: int) -> list[float]:
        """Check log-probs: one for each token, not positive, no stand-in for minus infinity."""
        logprobs = [self.check_logprob(value) for value in values]
        if len(logprobs) != count:
            raise self.contract_error(f"returned {len(logprobs)} log-probs for {count} tokens")
        return logprobs

    def check_logprob(self, value: object) -> float:
        if value is None:
            raise self.missing_logprobs_error()
        try:
            number = float(value) if type(value) is float or type(value) is int else math.nan
        except OverflowError:
            number = math.nan
        if not number >= _LOWEST_LOGPROB:  # NaN neither
            raise self.contract_error(f"returned {short_repr(value)} as a log-prob")
        if number > _HIGHEST_LOGPROB:
            raise self.contract_error(f"returned a positive log-prob ({number:.4g})")
        return min(number, 0.0)

    def check_probe(self, value: object, where: str, token_ids: Sequence[int]) -> Sequence[object]:
        """Return the entries of a probe but the first, which is null: nothing comes before it."""
        entries = self.require_array(value, where)
        if len(entries) != len(token_ids):
            raise self.contract_error(f"returned log-probs of {len(entries)} prompt tokens, {len(token_ids)} were sent")
        return entries[1:]

    def missing_logprobs_error(self) -> EngineError:
        return self.contract_error("does not return log-probs of the sampled tokens")

    def check_prompt_echo(self, value: object, request: GenerationRequest, fix: str) -> None:
        if value is None:
            raise self.contract_error("does not return the prompt ids that the model got", fix)
        got, sent = self.require_array(value, "the echo of the prompt"), list(request.prompt_ids)
        if got == sent:  # compared in C: this covers the whole prompt in every turn
            return
        at = next((n for n, (a, b) in enumerate(zip(got, sent, strict=False)) if a != b), min(len(got), len(sent)))
        if at == min(len(got), len(sent)):
            difference = f"{len(got)} instead of {len(sent)}"
        else:
            difference = f"first at position {at}: {short_repr(got[at])} instead of {sent[at]}"
        raise self.contract_error(f"worked on other prompt ids than it was sent ({difference})", fix)

    def check_routed_experts(self, value: object) -> object:
        """Check routed experts: the form is the engine's own, but a record must be able to hold it."""
        if is_too_deep(value):
            raise self.contract_error("returned routed_experts that are nested too deeply")
        try:
            json.dumps(value, allow_nan=False)  # 1e999 is JSON, and infinite
        except ValueError:
            raise self.contract_error("returned routed_experts with a number that is not finite") from None
        return value

    def token_versions(self, spans: object, count: int, version: int) -> list[int]:
        """Return the policy version of each token out of an engine's spans of weight versions.

        A label is a policy version when it is an integer, or a word and an integer (``7``, ``v7``, ``step-7``); tokens
        under any other label (``default``), or without spans, have the ``version`` that the pool has set. Spans are
        objects with ``version``, ``start`` and ``end``, in order and without a gap.
        """
        versions: list[int] = []
        for span in () if spans is None else self.require_array(spans, "weight_versions"):
            part = self.require_object(span, "a span of weight_versions")
            start, end = part.get("start"), part.get("end")
            if type(start) is not int or type(end) is not int or start != len(versions) or end < start:
                raise self.contract_error("returned weight_versions that do not follow each other")
            label = parse_version_label(part.get("version"))
            versions += [version if label is None else label] * (min(end, count) - start)
            if len(versions) == count:
                return versions
        if versions:
            raise self.contract_error(f"returned the weight version of {len(versions)} of {count} tokens")
        return [version] * count


def names_policy_versions(spans: object) -> bool:
    """Whether every span of weight versions names a policy version. Invalid spans are refused elsewhere."""
    if not isinstance(spans, list) or not spans:
        return False
    return all(parse_version_label(get_nested(span, "version")) is not None for span in cast("list[object]", spans))


def parse_version_label(label: object) -> int | None:
    """Return the policy version of a weight version's label, or ``None``; see ``ResponseValidator.token_versions``."""
    if type(label) is int:
        return label if 0 <= label <= _LARGEST_VERSION else None
    found = _VERSION.fullmatch(label) if isinstance(label, str) else None
    return int(found.group(1)) if found else None


def check_cached_tokens(value: object, prompt: int) -> int | None:
    """Return the tokens that the engine found in its cache, if it reports a possible number."""
    return value if type(value) is int and 0 <= value <= prompt else None


def read_cached_tokens(answer: object, prompt: int) -> int | None:
    """Return the cached tokens of an answer in the form of OpenAI's API; see ``check_cached_tokens``."""
    return check_cached_tokens(get_nested(answer, "usage", "prompt_tokens_details", "cached_tokens"), prompt)


def get_nested(value: object, *keys: str) -> object:
    """Follow keys into nested objects; ``None`` where the path ends early."""
    for key in keys:
        value = cast("dict[str, object]", value).get(key) if isinstance(value, dict) else None
    return value


def short_repr(value: object) -> str:
    """Return a short form for messages. Containers are not printed: they may be nested too deeply."""
    plain = value is None or isinstance(value, str | int | float)
    return repr(value)[:40] if plain else f"a {type(value).__name__}"


def printable(text: str) -> str:
    """Return an engine's message on one line, without control characters: it ends up in logs and records."""
    return " ".join("".join(character if character.isprintable() else " " for character in text).split())
