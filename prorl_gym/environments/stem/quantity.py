"""Comparing two quantities. Runs in a worker process: what a model wrote is read here.

A missing unit is a mistake, as in any examination: ``5`` is not ``5 N`` unless the row says that the unit may be left
out. A gold answer without a unit stands for a pure number, or for one in the unit that the question asks for.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from prorl_gym.environments.stem import labels
from prorl_gym.environments.stem.reading import Quantity, asked_unit, asks_difference, read
from prorl_gym.environments.stem.spelling import unfonted
from prorl_gym.environments.stem.tokens import Unreadable
from prorl_gym.environments.stem.unit_text import Measure

_ROUNDING = 1e-9
WIDEST_SPREAD = 0.25
"""Of an answer's uncertainty, relative to its number; with a wider one it is a range."""
_OWN_KIND = {"level", "points"}
"""What no plain number or per cent stands for."""
_ZERO_POINT = 0.2
"""Kelvins between two spellings of a temperature, since 273 and 273.15 are both in use."""


def grade(body: Mapping[str, Any]) -> dict[str, Any]:
    """Worker entry.

    Args:
        body: ``gold``, ``answer``, ``question``, ``tolerance`` (relative), ``absolute_tolerance`` (in the gold
            answer's unit), ``unit_optional``.

    Returns:
        ``verdict`` (``equal``, ``different``, ``unread``: the answer is no quantity, ``bad_gold``) and ``why``.
    """
    try:
        gold = read(body["gold"])
    except Unreadable as complaint:
        return {"verdict": "bad_gold", "why": str(complaint)}
    if labels.names_another(unfonted(body["answer"]), unfonted(body["gold"]), unfonted(body["question"])):
        return {"verdict": "different", "why": "another quantity is named"}
    counted = frozenset(labels.folded(word) for one in gold for word in one.label.split())
    try:
        answer = read(body["answer"], labels.counted_in(body["question"]) | counted)
    except Unreadable as complaint:
        return {"verdict": "unread", "why": f"the answer is no single quantity: {complaint}"}
    asked = None if gold[0].unit.given else asked_unit(body["question"])
    if asks_difference(body["question"]):
        gold, answer = ([_without_zero(one) for one in each] for each in (gold, answer))
        asked = replace(asked, zero=0.0) if asked else None
    why = ""
    for wanted in gold:
        for given in answer:
            found = _difference(wanted, given, asked, body)
            if not found:
                return {"verdict": "equal", "why": ""}
            why = why or found
    return {"verdict": "different", "why": why}


def _without_zero(quantity: Quantity) -> Quantity:
    """Return a temperature as a difference of two: 25 °C are 25 K then."""
    return replace(quantity, unit=replace(quantity.unit, zero=0.0))


def _difference(gold: Quantity, answer: Quantity, asked: Measure | None, rules: Mapping[str, Any]) -> str:
    """Return what is wrong with an answer; empty: nothing."""
    if answer.label and gold.label and answer.label != gold.label:
        return "something else is counted"
    if answer.spread > max(WIDEST_SPREAD, gold.spread):
        return "the uncertainty leaves the value open"
    unit = gold.unit if gold.unit.given else asked or gold.unit
    if answer.unit.given:
        if not unit.given and answer.unit.name == "degree" and not gold.unit.given:
            return "" if _close(answer.value, gold.value, rules) else "the value differs"
        values = _converted(answer, unit)
        if values is None:
            return "the unit is of another kind"
    else:
        pure = gold.unit.given and not gold.unit.dimension and not gold.unit.flavours
        if pure and _close(answer.value / unit.factor, gold.value, rules):
            return ""  # 0.125 is 12.5 %
        if gold.unit.given and not rules["unit_optional"]:
            return "the unit is missing"
        values = (answer.value,)
    slack = _ZERO_POINT * unit.zero / 273.15 if answer.unit.given and unit.zero != answer.unit.zero else 0.0
    return "" if any(_close(value, gold.value, rules, slack) for value in values) else "the value differs"


def _close(value: float, gold: float, rules: Mapping[str, Any], slack: float = 0.0) -> bool:
    allowed = max(rules["tolerance"] * abs(gold), rules["absolute_tolerance"], slack)
    return abs(value - gold) <= allowed + _ROUNDING * max(abs(gold), abs(value) if allowed else 0.0)


def _converted(answer: Quantity, unit: Measure) -> tuple[float, ...] | None:
    """Return an answer's number in another unit; ``None`` where they measure different things."""
    if answer.unit.dimension != unit.dimension:
        return None
    ratio = _flavour_ratio(answer.unit, unit)
    if ratio is None:
        return None
    base = (answer.value + answer.unit.zero) * answer.unit.factor * ratio
    return (base / unit.factor - unit.zero,)


def _flavour_ratio(answer: Measure, unit: Measure) -> float | None:
    """Return what to multiply with where units of one dimension differ in what they measure."""
    first, second = dict(answer.flavours), dict(unit.flavours)
    if first == second:
        return 1.0
    if not first or not second:
        return None if _OWN_KIND & {*first, *second} else 1.0
    angles = {"angle", "turn"}
    if set(first) <= angles and set(second) <= angles and sum(first.values()) == sum(second.values()):
        return 1.0
    if set(first) == {"turn"} and set(second) == {"cycle"}:
        return math.tau ** -first["turn"]
    if set(first) == {"cycle"} and set(second) == {"turn"}:
        return math.tau ** first["cycle"]
    return None
