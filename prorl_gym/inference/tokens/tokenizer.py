"""A thin, typed wrapper around a Hugging Face tokenizer, and loading one: the only file that imports ``transformers``.

It keeps apart two ways of encoding. ``encode_trusted`` reads strings such as ``<|im_end|>`` as the control tokens they
spell: for text that a chat template wrote. ``encode_untrusted`` never does: for all other text (tasks, users, tools).
``ControlTokenEscaper`` encodes a rendered conversation, which is a mixture of both.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingTypeStubs=false

import json
import logging
import os
import re
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from typing import Any, cast

from prorl_gym.errors import ConfigError

SMALL_TOKENIZER = "small"
"""Name of the tokenizer that ships with this package: for the demo and for tests."""

SMALL_DIRECTORY = Path(__file__).parents[2] / "oracle" / "tokenizer"

_TOKENIZER_FIX = "Set 'inference.tokenizer' (in NeMo Gym: +prorl_tokenizer=DIR; on the command line: --tokenizer DIR)."

_SURROGATES = re.compile("[\ud800-\udfff]")

_HUB_LOGGERS = ("huggingface_hub", "transformers")
_HUB_SECONDS = 10.0

_MARK_OPEN, _MARK_CLOSE = "\ue0f0", "\ue0f1"
_MARK = re.compile(f"{_MARK_OPEN}([0-9]+){_MARK_CLOSE}")


class Tokenizer:
    """Text to ids and back, with the chat template that belongs to it."""

    def __init__(self, raw: Any, source: str) -> None:
        self.raw = raw
        """A fast ``transformers`` tokenizer, for what this class lacks; what others wrote is never encoded with it."""
        self.source = source
        self.control_ids: Mapping[str, int] = {
            token.content: index
            for index, token in raw.added_tokens_decoder.items()
            if token.special or token.content.strip()  # some vocabularies add runs of blanks: these are ordinary text
        }
        """Strings that spell control tokens, and their ids."""
        self.eos_ids = frozenset[int]() if raw.eos_token_id is None else frozenset({int(raw.eos_token_id)})
        """Ids that the tokenizer itself calls an end: not always the end of a turn."""
        self.control_pattern = _any_of(self.control_ids) or re.compile(r"(?!)")
        self._normalizer = raw.backend_tokenizer.normalizer
        normalized = [token.content for token in raw.added_tokens_decoder.values() if token.normalized]
        self._normalized_control = _any_of(map(self._normalizer.normalize_str, normalized) if self._normalizer else ())

    @cached_property
    def vocab_size(self) -> int:
        """One more than the largest id: more than the number of tokens where the vocabulary has gaps."""
        return max(self.raw.get_vocab().values(), default=-1) + 1

    @property
    def chat_template(self) -> str:
        return str(self.raw.chat_template)

    def encode_trusted(self, text: str) -> list[int]:
        """Encode text that a template wrote: control strings become control tokens. Nothing is added around it."""
        return _ids(self.raw.backend_tokenizer, text)

    def encode_untrusted(self, text: str) -> list[int]:
        """Encode text so that no control string in it is read as one."""
        if self.control_pattern.search(text) is None and not self.normalizes_to_control(text):
            return self.encode_trusted(text)
        return _ids(self._without_control_tokens, text)

    def normalizes_to_control(self, text: str) -> bool:
        """Whether normalization turns it into a control string, for example a fullwidth ``<`` into ``<``."""
        if self._normalized_control is None:
            return False
        return self._normalized_control.search(self._normalizer.normalize_str(_replace_surrogates(text))) is not None

    def decode(self, ids: Sequence[int]) -> str:
        """Decode ids verbatim: control tokens are shown, blanks are kept, broken UTF-8 becomes U+FFFD."""
        return self.raw.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        template_options: Mapping[str, Any],
        *,
        add_generation_prompt: bool,
    ) -> str:
        """Render a conversation in the Jinja environment of ``transformers``. Raises whatever the template raises."""
        return self.raw.apply_chat_template(
            [dict(message) for message in messages],
            tools=[dict(tool) for tool in tools] or None,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            **template_options,
        )

    @property
    def has_response_template(self) -> bool:
        """Whether the tokenizer declares how to read what its model writes (``response_template``)."""
        return bool(getattr(self.raw, "response_template", None)) and hasattr(self.raw, "parse_response")

    def parse_response(self, prefix: str, text: str, tools: Sequence[Mapping[str, Any]]) -> object:
        """Read a turn that follows ``prefix``, by the tokenizer's own declaration, which may raise anything."""
        return self.raw.parse_response(text, prefix=prefix, tools=[dict(tool) for tool in tools] or None)

    @cached_property
    def _without_control_tokens(self) -> Any:
        """The same vocabulary and merges without the control tokens; built when the first text spells one."""
        from tokenizers import Tokenizer as Backend

        definition = json.loads(self.raw.backend_tokenizer.to_str())
        definition["added_tokens"] = [
            token for token in definition["added_tokens"] if token["content"] not in self.control_ids
        ]
        definition["post_processor"] = None  # it may name a control token, and adds nothing that is wanted
        return Backend.from_str(json.dumps(definition))


class ControlTokenEscaper:
    """Encodes one rendered conversation in which only the template may write control tokens.

    Every string from outside the template passes ``escape`` before it is rendered, which replaces control strings by
    marks of private-use characters. In the rendered text each control string is then the template's own. ``encode``
    cuts the text there, turns the marks back into what they hide, and encodes each piece with control tokens unknown.

    A conversation that spells no control string, which is nearly every one, is encoded in one go and so gives exactly
    the ids that a plain encoding of the rendered text gives.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        # A mark's first character is escaped too, so that no text can forge a mark.
        self._pattern = re.compile(f"{tokenizer.control_pattern.pattern}|{_MARK_OPEN}")
        self._escaped: list[str] = []
        self._has_normalized_control = False
        """Whether some text becomes a control string only when it is normalized: there is none to replace."""

    def escape(self, text: str) -> str:
        self._has_normalized_control = self._has_normalized_control or self._tokenizer.normalizes_to_control(text)
        return self._pattern.sub(self._escape_match, text)

    def escape_all(self, value: Any) -> Any:
        """Escape every string of a JSON-like value, keys included."""
        if isinstance(value, str):
            return self.escape(value)
        if isinstance(value, Mapping):
            items = cast("Mapping[Any, Any]", value)
            return {self.escape_all(key): self.escape_all(item) for key, item in items.items()}
        if isinstance(value, list | tuple):
            return [self.escape_all(item) for item in cast("Sequence[Any]", value)]
        return value

    def encode(self, rendered: str) -> list[int]:
        """Encode rendered text: control strings in it are the template's, marks are untrusted text."""
        if not self._escaped and not self._has_normalized_control:
            return self._tokenizer.encode_trusted(rendered)
        return self.encode_in_pieces(rendered)

    def encode_in_pieces(self, rendered: str) -> list[int]:
        """Encode around every control string; the start-up check compares this with ``encode`` on ordinary text."""
        ids: list[int] = []
        position = 0
        for found in self._tokenizer.control_pattern.finditer(rendered):
            ids += self._encode_piece(rendered[position : found.start()])
            ids.append(self._tokenizer.control_ids[found.group()])
            position = found.end()
        return ids + self._encode_piece(rendered[position:])

    def _encode_piece(self, piece: str) -> list[int]:
        return self._tokenizer.encode_untrusted(_MARK.sub(self._unescape_match, piece)) if piece else []

    def _escape_match(self, found: re.Match[str]) -> str:
        self._escaped.append(found.group())
        return f"{_MARK_OPEN}{len(self._escaped) - 1}{_MARK_CLOSE}"

    def _unescape_match(self, found: re.Match[str]) -> str:
        place = int(found.group(1)[:9])
        # A place that was never escaped: the template writes such characters itself.
        return self._escaped[place] if place < len(self._escaped) else found.group()


def load_tokenizer(source: str, chat_template: Path | None = None) -> Tokenizer:
    """Load a tokenizer.

    ``source``: ``small``, a directory with ``tokenizer.json``, or a model's ``owner/name`` on a hub (only then is a
    network used). ``chat_template``: a Jinja file that replaces the tokenizer's own template. Raises ``ConfigError``:
    it cannot be loaded, it is not a fast tokenizer, or it has no chat template.
    """
    directory = SMALL_DIRECTORY if source == SMALL_TOKENIZER else Path(source).expanduser()
    local = bool(source) and directory.is_dir()
    if not local and (source.startswith((".", "/", "~")) or source.count("/") > 1 or not source):
        raise ConfigError(f"tokenizer '{source}': no such directory.", _TOKENIZER_FIX)
    if not local and "/" not in source:  # do not query a hub for minutes because of a typo
        close = "Did you mean 'small'? " if get_close_matches(source.lower(), [SMALL_TOKENIZER], cutoff=0.6) else ""
        raise ConfigError(
            f"tokenizer '{source}': not 'small', no directory, no 'owner/name' on a hub.", close + _TOKENIZER_FIX
        )
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # its thread pool does not survive our forks
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # PyTorch is not needed
    raw = _load(str(directory), local=True) if local else _load_from_hub(source)
    if not getattr(raw, "is_fast", False):
        raise ConfigError(f"{source}: not a fast tokenizer.", "Convert it: tokenizer.json must exist.")
    if chat_template is not None:
        try:
            raw.chat_template = chat_template.read_text(encoding="utf-8")
        except OSError as error:
            reason = f"{chat_template}: cannot be read ({error.strerror})."
            raise ConfigError(reason, "Check 'chat_template'.") from None
    if not raw.chat_template:
        raise ConfigError(f"{source}: has no chat template.", "Name one with 'chat_template: FILE.jinja'.")
    return Tokenizer(raw, source)


def _load_from_hub(name: str) -> Any:
    """Load from a hub, or from its local cache when the hub does not answer."""
    with quiet_logs():
        is_there = is_reachable(name)
        try:
            return _load(name, local=not is_there)
        except ConfigError as error:
            if is_there:
                raise ConfigError(error.what, _TOKENIZER_FIX) from None
        raise ConfigError(f"tokenizer '{name}': no such directory, and the hub cannot be reached.", _TOKENIZER_FIX)


def _load(source: str, *, local: bool) -> Any:
    from transformers import AutoTokenizer  # slow to import

    try:
        return AutoTokenizer.from_pretrained(source, local_files_only=local)
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = str(error).strip().partition("\n")[0][:200]
        raise ConfigError(f"{source}: not a tokenizer ({reason}).", "It needs a tokenizer.json.") from None


def is_reachable(name: str) -> bool:
    """Whether the hub answers one short request. Its client alone would retry six times, twice, and log each try."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import HfHubHTTPError

    try:
        get_hf_file_metadata(hf_hub_url(name, "config.json"), timeout=_HUB_SECONDS)
    except HfHubHTTPError:
        return True  # it answered: whether it has the model shows when it is loaded
    except Exception:  # versions of the client use different HTTP libraries, with errors of their own
        return False
    return True


@contextmanager
def quiet_logs() -> Generator[None, None, None]:
    """Keep the hub client's warnings out of the log while a tokenizer is loaded: the error repeats them."""
    loggers = [logging.getLogger(name) for name in _HUB_LOGGERS]
    before = [(logger, logger.level) for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in before:
            logger.setLevel(level)


def _ids(backend: Any, text: str) -> list[int]:
    # The batch form alone releases the GIL and computes no offsets.
    return list(backend.encode_batch_fast([_replace_surrogates(text)], add_special_tokens=False)[0].ids)


def _replace_surrogates(text: str) -> str:
    """Replace lone surrogates: JSON can spell them, and a tokenizer refuses the whole text for one."""
    return _SURROGATES.sub("\ufffd", text)


def _any_of(texts: Iterable[str]) -> re.Pattern[str] | None:
    """Return a pattern of these texts, the longest first; ``None`` where there is none."""
    found = sorted(filter(str.strip, texts), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, found))) if found else None
