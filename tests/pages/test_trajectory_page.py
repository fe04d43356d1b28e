import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from prorl_gym.pages.trajectory import render
from prorl_gym.trainers.gym import to_gym_result

sys.path.insert(0, str(Path(__file__).parents[1] / "trainers"))
from rollout_samples import ROW, failed, rollout


def decode(ids: Any) -> str:
    return "".join(f"<{token}>" for token in ids)


class Spans(HTMLParser):
    """Collects the text of every span by class, and every tag name."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.texts: list[tuple[str, str]] = []
        self.tags: set[str] = set()
        self._open: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        if tag == "span":
            self._open.append(dict(attrs).get("class") or "")

    def handle_endtag(self, tag: str) -> None:
        if tag == "span":
            self._open.pop()

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] in ("given", "sampled"):
            self.texts.append((self._open[-1], data))


def body(page: str) -> list[tuple[str, str]]:
    return Spans(page[page.index("<details ") :]).texts


def test_every_token_is_shown_once_under_its_mask():
    shown = body(render([to_gym_result(rollout(), ROW)], decode))
    assert shown == [
        ("given", "<1><2><3>"),
        ("sampled", "<100>"),
        ("sampled", "<9>"),
        ("given", "<51>"),
        ("sampled", "<101>"),
        ("sampled", "<9>"),
    ]


def test_hostile_text_stays_text():
    row = ROW | {"environment": "<script>alert(1)</script>"}
    page = render([to_gym_result(rollout(), row)], lambda ids: "</pre><script>alert(2)</script>")
    assert "script" not in Spans(page).tags


def test_tokens_that_share_a_character_are_shown_together():
    smile = "\N{GRINNING FACE}".encode()
    page = render([to_gym_result(rollout(), ROW)], lambda ids: smile[: 2 * len(ids)].decode(errors="replace"))
    assert ("sampled", "\N{GRINNING FACE}") in body(page)


def test_page_loads_nothing():
    page = render([to_gym_result(rollout(), ROW)], decode)
    assert "http" not in page.replace("http-equiv", "")
    assert {"script", "link", "img"}.isdisjoint(Spans(page).tags)


def test_masked_rollout_names_its_failure():
    assert "masked (provider_unavailable)" in render([to_gym_result(failed(), ROW)], decode)


def test_rows_stand_by_task_and_repeat_with_an_index():
    places = [(1, 0), (0, 1), (0, 0)]
    results = [to_gym_result(rollout(), ROW | {"_ng_task_index": t, "_ng_rollout_index": r}) for t, r in places]
    for result in results:
        result["task"] = {"id": f"t{result['_ng_task_index']}"}
    page = render(results, decode)
    order = ["t0 #0", "t0 #1", "t1 #0"]
    for part in (page[: page.index("<details ")], page[page.index("<details ") :]):
        assert [part.index(name) for name in order] == sorted(part.index(name) for name in order)
    assert page.count('href="#r') == page.count('id="r') == 3


def test_one_turn_is_one_turn():
    result = to_gym_result(rollout(), ROW)
    assert "1 turn," in render([result | {"prorl_turns": 1}], decode)
    assert "2 turns," in render([result | {"prorl_turns": 2}], decode)


def test_failed_ones_can_be_filtered_without_a_program():
    page = render([to_gym_result(rollout(), ROW), to_gym_result(failed(), ROW)], decode)
    assert "#failed:checked ~ .is-good" in page
    assert '<input type="checkbox" id="failed">' in page
