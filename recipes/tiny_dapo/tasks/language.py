"""A tokenizer that fits one domain, with its chat template, and the turns of the warm-up in its tokens."""

import json
import random
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from tasks.question import MIXTURE, Question, shipped_prompt

CONTROL = ("<|pad|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|end|>", "<tool_call>", "</tool_call>")

# Every turn is a control token, text, and <|end|>. Tools are shown by name: a short prompt leaves room for learning.
CHAT_TEMPLATE = """
{%- if messages[0].role != 'system' and tools -%}<|system|>{%- endif -%}
{%- for message in messages -%}
  {{- '<|' + message.role + '|>' + message.content -}}
  {%- for call in message.tool_calls or [] -%}
    {%- set call = call.function if call.function else call -%}
    {{- '<tool_call>{"name": ' + (call.name | tojson) + ', "arguments": ' + (call.arguments | tojson) -}}
    {{- '}</tool_call>' -}}
  {%- endfor -%}
  {%- if loop.first and message.role == 'system' -%}
    {%- for tool in tools or [] -%}{{- ' ' + tool.function.name -}}{%- endfor -%}
  {%- endif -%}
  {{- '<|end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}
"""


class TurnEncoder:
    """Turns of the conversation as token ids, exactly as the chat template renders them.

    Args:
        tokenizer: see ``train_tokenizer``.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        (self.end,) = self.encode("<|end|>")
        self.vocab_size = tokenizer.get_vocab_size()

    def encode(self, text: str) -> list[int]:
        """Encode text in which control strings are control tokens."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: list[int]) -> str:
        """Decode ids, control tokens shown."""
        return self._tokenizer.decode(ids, skip_special_tokens=False)

    def prompt(self, question: Question) -> list[int]:
        """Return what the model sees first."""
        system, tools = shipped_prompt(question.environment)
        return self.encode(f"<|system|>{system}{tools}<|end|><|user|>{question.message}<|end|><|assistant|>")

    def turn(self, text: str) -> list[int]:
        """Return a turn of the assistant."""
        return self.encode(f"{text}<|end|>")

    def result(self, text: object) -> list[int]:
        """Return what a tool says, up to where the model speaks next."""
        return self.encode(f"<|tool|>{text}<|end|><|assistant|>")


def trace(language: TurnEncoder, question: Question, rng: random.Random) -> tuple[list[int], list[int]]:
    """Return ids and mask of a warm-up trace of a random kind."""
    (kind,) = rng.choices(list(MIXTURE), list(MIXTURE.values()))
    pieces = [(language.prompt(question), 0)]
    said: list[str] = []
    for turn in question.demonstrate(kind):
        said.append(turn)
        pieces.append((language.turn(turn), 1))
        answer = question.respond(said)
        if isinstance(answer, str):
            pieces.append((language.result(answer), 0))
    return [token for ids, _ in pieces for token in ids], [sampled for ids, sampled in pieces for _ in ids]


def train_tokenizer(domain: type[Question]) -> Tokenizer:
    """Train a byte-level BPE on the fixed strings of a domain: each becomes a token or a few, digits stay apart."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"[0-9+\-]"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1536,
        min_frequency=2,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in CONTROL],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([*shipped_prompt(domain.environment), *domain.phrases] * 2, trainer)
    return tokenizer


def write_tokenizer(domain: type[Question], directory: Path) -> TurnEncoder:
    """Write what the service loads as ``inference.tokenizer``, and return the same language."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer(domain)
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|end|>",
        "pad_token": "<|pad|>",
        "bos_token": None,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=1), encoding="utf-8")
    return TurnEncoder(tokenizer)
