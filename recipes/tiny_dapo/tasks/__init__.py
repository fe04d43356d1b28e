"""The four domains of the recipe; ``question.py`` says what each has."""

from tasks.conversions import Conversion
from tasks.expressions import Expression
from tasks.language import CONTROL, TurnEncoder, trace, train_tokenizer, write_tokenizer
from tasks.question import HELD_OUT, MAX_TOKENS, Question, held_out, questions, shipped_prompt
from tasks.repairs import Repair
from tasks.sums import Sum

DOMAINS: dict[str, type[Question]] = {domain.environment: domain for domain in (Sum, Expression, Conversion, Repair)}

__all__ = [
    "CONTROL",
    "DOMAINS",
    "HELD_OUT",
    "MAX_TOKENS",
    "Conversion",
    "Expression",
    "Question",
    "Repair",
    "Sum",
    "TurnEncoder",
    "held_out",
    "questions",
    "shipped_prompt",
    "trace",
    "train_tokenizer",
    "write_tokenizer",
]
