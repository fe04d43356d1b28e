"""Checks of what engines answer, for all dialects.

An engine's answer is untrusted. Everything from which a trainer would silently learn garbage is refused here as
``ENGINE_CONTRACT``, with the address and what to change on the server.
"""

import json
import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NoReturn, cast

from prorl_gym.errors import EngineError, FailureKind
from prorl_gym.inference.json_depth import is_too_deep
from prorl_gym.inference.protocol import GenerationRequest

FinishReason = Literal["stop", "length", "abort"]

_HIGHEST_LOGPROB = 1e-3
"""A log-probability cannot be positive, except for rounding in an engine's arithmetic."""

_LOWEST_LOGPROB = -3.4028234663852886e38
"""Of float32, in which trainers hold them: anything lower is minus infinity there."""

_CONTEXT_SLACK = 8
"""Tokens by which servers end a call before their context is full: SGLang keeps one or two free."""

_LARGEST_VERSION = 10**15 - 1
_VERSION = re.compile(r"(?:[A-Za-z]+[-_:]?)?([0-9]{1,15})")


class PrematureLengthStop(EngineError):
    """A call ended at ``length`` before its limit, and not at the engine's context either, if that is known."""

    def __init__(self, what: str, fix: str) -> None:
        super().__init__(FailureKind.ENGINE_CONTRACT, what, fix)


@dataclass(frozen=True, slots=True)
class CallExpectation:
    """What is known about a call when its tokens are checked."""

    context_length: int | None = None
    """The engine's context in tokens, as far as it is known."""
    stopped_by_guard: bool = False
    """Something else than a stop token ended the turn (a guard against repetition), as the engine reports."""
    is_trial: bool = False
    """Only whether it samples counts."""


@dataclass(frozen=True, slots=True)
class ResponseValidator:
    """Reads answers of one engine."""

    address: str
    """Of the engine, for messages."""
    vocab_size: int
    """Ids at or above it are refused."""
    server_kind: str
    """What should listen there, for messages: ``a vLLM server``."""
    fix: str
    """What helps when it does not keep its promises."""
    model: str = ""
    """The name that the server serves the model under."""
    control_ids: frozenset[int] = frozenset()
    """Control tokens of the vocabulary: a model may end its turn with one that was not named as a stop id."""

    def contract_error(self, what: str, fix: str = "") -> EngineError:
        """Return the error for a broken promise of the engine."""
        return EngineError(FailureKind.ENGINE_CONTRACT, f"engine {self.address}: {what}.", fix or self.fix)

    def parse_object(self, payload: bytes) -> Mapping[str, object]:
        """Parse an answer: strict JSON, an object."""
        try:
            answer: object = _STRICT_JSON.decode(payload.decode())
        except (ValueError, RecursionError):
            raise self.contract_error(
                "the answer is not JSON", f"Check that 'engines' names {self.server_kind} and not something before it."
            ) from None
        return self.require_object(answer, "the answer")

    def require_object(self, value: object, what: str) -> Mapping[str, object]:
        """Return a JSON object."""
        if not isinstance(value, dict):
            raise self.contract_error(f"{what} is not an object")
        return cast("dict[str, object]", value)

    def require_array(self, value: object, what: str) -> Sequence[object]:
        """Return a JSON array."""
        if not isinstance(value, list):
            raise self.contract_error(f"{what} is not a list")
        return cast("list[object]", value)

    def only_choice(self, answer: Mapping[str, object]) -> Mapping[str, object]:
        """Return the one choice of an answer in OpenAI's shape."""
        choices = answer.get("choices")
        if not isinstance(choices, list) or len(cast("list[object]", choices)) != 1:
            raise self.contract_error("did not answer with exactly one choice")
        return self.require_object(cast("list[object]", choices)[0], "its choice")

    def translate_finish_reason(self, value: object, known: Mapping[str, FinishReason]) -> FinishReason:
        """Translate why sampling ended."""
        if not isinstance(value, str) or value not in known:
            raise self.contract_error(f"ended with finish_reason {short_repr(value)}, which is not known")
        return known[value]

    def check_model_name(self, value: object, aliases: Collection[str] = ()) -> None:
        """Check the name of the model that answered, if there is one.

        Args:
            value: the name in the answer.
            aliases: other names of the same model.
        """
        if isinstance(value, str) and value != self.model and value not in aliases:
            raise self.contract_error(
                f"answered with the model '{printable(value[:80])}', '{self.model}' was requested",
                "Check that 'engines' and 'model' belong together, and any proxy before the server.",
            )

    def check_sampled_ids(
        self, value: object, where: str, request: GenerationRequest, finish: FinishReason, expectation: CallExpectation
    ) -> list[int]:
        """Check sampled ids: inside the vocabulary, and ending where the request requires it.

        Raises:
            PrematureLengthStop: ``length``, and neither the limit of the call nor the context is used up.
            EngineError: ``ENGINE_CONTRACT``.
        """
        ids = self.check_ids(value, where)
        if not ids and finish != "abort":
            raise self.contract_error("sampled no token at all")
        if expectation.is_trial:
            return ids
        if len(ids) > request.max_tokens:
            raise self.contract_error(f"sampled {len(ids)} tokens, {request.max_tokens} were requested")
        stops = frozenset(request.stop_token_ids)
        passed = next((token for token in ids[:-1] if token in stops), None)
        if passed is not None:
            raise self.contract_error(f"sampled on after the stop token {passed}")
        if finish == "stop" and stops and not expectation.stopped_by_guard and ids[-1] not in stops | self.control_ids:
            raise self.contract_error(f"stopped at token {ids[-1]}, which is no stop token")
        if finish == "length" and len(ids) < request.max_tokens:
            self._require_full_context(
                len(request.prompt_ids) + len(ids), request.max_tokens - len(ids), expectation.context_length
            )
        return ids

    def _require_full_context(self, length: int, missing: int, context: int | None) -> None:
        if context is None or length < context - _CONTEXT_SLACK:
            raise PrematureLengthStop(
                f"engine {self.address}: ended a call at 'length' {missing} tokens before its limit"
                f"{'' if context is None else f', at {length} of {context} tokens of context'}.",
                "Remove its own limit on new tokens, or set 'max_turn_tokens' (and 'max_model_len') to what it allows.",
            )

    def check_ids(self, value: object, where: str) -> list[int]:
        """Check token ids."""
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
        """Check log-probs: one for each token, finite, not positive."""
        logprobs = [self.check_logprob(value) for value in values]
        if len(logprobs) != count:
            raise self.contract_error(f"returned {len(logprobs)} log-probs for {count} tokens")
        return logprobs

    def check_logprob(self, value: object) -> float:
        """Check one log-prob."""
        if value is None:
            raise self.missing_logprobs_error()
        number = _as_float(value)
        if number is None or not math.isfinite(number) or number < _LOWEST_LOGPROB:
            raise self.contract_error(f"returned {short_repr(value)} as a log-prob")
        if number > _HIGHEST_LOGPROB:
            raise self.contract_error(f"returned a positive log-prob ({number:.4g})")
        return min(number, 0.0)

    def missing_logprobs_error(self) -> EngineError:
        """Return the error for log-probs that are missing."""
        return self.contract_error("does not return log-probs of the sampled tokens")

    def check_prompt_echo(self, value: object, request: GenerationRequest, fix: str) -> None:
        """Compare the engine's echo of the prompt with what it was sent."""
        if value is None:
            raise self.contract_error("does not return the prompt ids that the model got", fix)
        got, sent = self.require_array(value, "the echo of the prompt"), list(request.prompt_ids)
        if got == sent:  # compared in C: this covers the whole prompt in every turn
            return
        at = next((n for n, (a, b) in enumerate(zip(got, sent, strict=False)) if a != b), min(len(got), len(sent)))
        raise self.contract_error(f"worked on other prompt ids than it was sent ({_difference(got, sent, at)})", fix)

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

        A label is a policy version when it is an integer, or a word and an integer (``7``, ``v7``, ``step-7``);
        tokens under any other label (``default``) have the version that the pool has set.

        Args:
            spans: objects with ``version``, ``start`` and ``end``, in order and without a gap; ``None``: not reported.
            count: tokens that were sampled.
            version: that the pool has set.
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
    """Return the policy version of a weight version's label, or ``None``; see ``ResponseValidator.versions``."""
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


def _difference(got: Sequence[object], sent: Sequence[int], at: int) -> str:
    if at == min(len(got), len(sent)):
        return f"{len(got)} instead of {len(sent)}"
    return f"first at position {at}: {short_repr(got[at])} instead of {sent[at]}"


def _as_float(value: object) -> float | None:
    if type(value) is float:
        return value
    try:
        return float(value) if type(value) is int else None
    except OverflowError:
        return None


def _refuse_constant(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


_STRICT_JSON = json.JSONDecoder(parse_constant=_refuse_constant)
"""Made once: an event of a stream is short, and there is one for each token."""
