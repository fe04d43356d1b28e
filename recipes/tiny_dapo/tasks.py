"""The task (sums of three numbers), the traces of the warm-up, and a tokenizer that fits both.

The math environment asks the questions and grades the answers; nothing here replaces it. A right solution takes two
calls of its python tool, one for each operation.
"""

import json
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

EXAMPLES = Path(__file__).resolve().parents[2] / "environments/prorl_math/data/example.jsonl"
CONTROL = ("<|pad|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|end|>", "<tool_call>", "</tool_call>")
TOOLS = " python finish"
CALL, CALL_END, BOX, BOX_END = '{"name": "python", "arguments": {"code": "', '"}}', "\\boxed{", "}"
HELD_OUT = 256
_SUM = re.compile(re.escape(f"<tool_call>{CALL}") + r"(-?\d+)([+-])(\d+)" + re.escape(f"{CALL_END}</tool_call><|end|>"))

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


@dataclass(frozen=True, slots=True)
class Question:
    """``a op b op c?`` with numbers of two digits."""

    a: int
    first: str
    b: int
    second: str
    c: int

    @property
    def text(self) -> str:
        """How it is asked."""
        return f"{self.a}{self.first}{self.b}{self.second}{self.c}?"

    @property
    def halfway(self) -> int:
        """Result of the first operation."""
        return calculate(self.a, self.first, self.b)

    @property
    def answer(self) -> int:
        """The right answer."""
        return calculate(self.halfway, self.second, self.c)

    @property
    def row(self) -> dict[str, str]:
        """The row that the math environment reads."""
        return {"question": self.text, "answer": str(self.answer)}


def calculate(a: int, operator: str, b: int) -> int:
    """Return ``a + b`` or ``a - b``."""
    return a + b if operator == "+" else a - b


def questions(seed: int) -> Iterator[Question]:
    """Yield questions for ever, none of them held out."""
    held = set(held_out())
    return (question for question in _any_questions(random.Random(f"training {seed}")) if question not in held)


def held_out(count: int = HELD_OUT) -> list[Question]:
    """Return the first of the questions that are never trained on: the same for every seed."""
    return list(islice(_any_questions(random.Random("held out")), HELD_OUT))[:count]


def _any_questions(rng: random.Random) -> Iterator[Question]:
    while True:
        a, b, c = (rng.randrange(10, 100) for _ in range(3))
        yield Question(a, rng.choice("+-"), b, rng.choice("+-"), c)


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
        return self.encode(f"<|system|>{system_prompt()}{TOOLS}<|end|><|user|>{question.text}<|end|><|assistant|>")

    def call(self, code: str) -> list[int]:
        """Return a turn that calls the python tool."""
        return self.encode(f"<tool_call>{CALL}{code}{CALL_END}</tool_call><|end|>")

    def result(self, value: int) -> list[int]:
        """Return what the tool says, up to where the model speaks next."""
        return self.encode(f"<|tool|>{value}<|end|><|assistant|>")

    def final(self, value: int) -> list[int]:
        """Return a turn that hands in an answer."""
        return self.encode(f"{BOX}{value}{BOX_END}<|end|>")

    def tool_answer(self, turn: list[int]) -> int | None:
        """Return what the python tool would answer to a sampled turn; ``None``: it is no call of one sum."""
        found = _SUM.fullmatch(self.decode(turn))
        return None if found is None else calculate(int(found[1]), found[2], int(found[3]))


def trace(language: TurnEncoder, question: Question, rng: random.Random) -> tuple[list[int], list[int]]:
    """Return ids and mask of a warm-up trace.

    Most traces stop after one call and hand in its result, so the greedy policy is wrong; some of them are right, so
    sampling finds what to learn from.
    """
    kind = rng.choices(("stop", "wrong operator", "right"), (63, 13, 24))[0]
    pieces = [
        (language.prompt(question), 0),
        (language.call(f"{question.a}{question.first}{question.b}"), 1),
        (language.result(question.halfway), 0),
    ]
    answer = question.halfway
    if kind != "stop":
        operator = question.second if kind == "right" else "+-".replace(question.second, "")
        answer = calculate(question.halfway, operator, question.c)
        pieces += [
            (language.call(f"{question.halfway}{operator}{question.c}"), 1),
            (language.result(answer), 0),
        ]
    pieces.append((language.final(answer), 1))
    return [token for ids, _ in pieces for token in ids], [sampled for ids, sampled in pieces for _ in ids]


@cache
def system_prompt() -> str:
    """Return the system prompt that the math environment ships with."""
    row = json.loads(EXAMPLES.read_text(encoding="utf-8").partition("\n")[0])
    return row["responses_create_params"]["input"][0]["content"]


def train_tokenizer() -> Tokenizer:
    """Train a byte-level BPE on the fixed strings of the task: each becomes a token or a few, digits stay apart."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"[0-9+\-]"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1024,
        min_frequency=2,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in CONTROL],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([system_prompt(), TOOLS, CALL, CALL_END, BOX] * 2, trainer)
    return tokenizer


def write_tokenizer(directory: Path) -> TurnEncoder:
    """Write what the service loads as ``inference.tokenizer``, and return the same language."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer()
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
