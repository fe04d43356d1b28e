"""The trajectory page as a browser has it: nothing runs, everything can be reached, it is quick."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from chromium_pages import LAPTOP, PHONE, expect, opened, overflow, settle, violations
from long_rollouts import ATTACK, decode, hostile_decode, long_rollout
from rollout_samples import ROW, failed, rollout

from prorl_gym.pages.gym_results_page import render_gym_results
from prorl_gym.pages.rollout_page import render_rollout
from prorl_gym.records import GradedSubmission, Message, Score
from prorl_gym.trainers.gym_result import to_gym_result

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = pytest.mark.chromium

Written = Callable[[str], str]


@pytest.fixture
def written(tmp_path: Path) -> Written:
    """Write a page; return its address."""

    def write(page: str) -> str:
        file = tmp_path / "page.html"
        file.write_text(page, encoding="utf-8")
        return file.as_uri()

    return write


def test_hostile_text_is_shown_and_does_not_run(browser: "Browser", written: Written) -> None:
    with opened(browser, written(render_rollout(long_rollout(2, 40, text=ATTACK), hostile_decode))) as page:
        page.get_by_role("button", name="Tokens").click()
        page.locator("#stream .t.s").first.click()
        page.get_by_label("Search this trajectory").fill("onerror")
        page.get_by_role("button", name="Next", exact=True).click()
        settle(page)
        assert page.locator("#stream .t").first.text_content() == ATTACK
        assert page.locator("h1").text_content() == f"{ATTACK} / code-0031-4"
        expect(page.locator("img, body script:not(:last-of-type):not(#data), svg[onload]")).to_have_count(0)
        assert page.evaluate("() => window.ran") is None


def test_hostile_results_do_not_run_either(browser: "Browser", written: Written) -> None:
    result = to_gym_result(rollout(), ROW | {"environment": ATTACK, "task": {"id": ATTACK}})
    result |= {"failure_reason": ATTACK, "prorl_outcome": ATTACK, "reward_components": {ATTACK: 1}}
    with opened(browser, written(render_gym_results([result, result], hostile_decode))) as page:
        assert ATTACK in (page.locator("#index tbody th").nth(1).text_content() or "")
        assert page.evaluate("() => window.ran") is None
        expect(page.locator("img")).to_have_count(0)


def test_every_token_is_coloured_three_ways_and_described(browser: "Browser", written: Written) -> None:
    record = long_rollout(3, 600)
    segment = record.segments[0]
    with opened(browser, written(render_rollout(record, decode))) as page:
        page.get_by_role("button", name="Tokens").click()
        stream = page.locator("#stream")
        expect(stream.locator(".t")).to_have_count(600)
        expect(stream.locator(".t.s")).to_have_count(sum(segment.mask))
        colours = set()
        for name, entries in (("mask", 2), ("log-prob", 5), ("policy version", 3)):
            page.get_by_label(name, exact=True).check()
            expect(page.locator("#legend li")).to_have_count(entries)
            colours.add(stream.locator(".t.s.p3").first.evaluate("token => getComputedStyle(token).backgroundColor"))
        assert len(colours) == 3
        position = segment.mask.index(1) + 5
        stream.locator(".t").nth(position).click()
        names, values = (page.locator(f"#token {tag}").all_text_contents() for tag in ("dt", "dd"))
        facts = dict(zip(names, values, strict=True))
        assert facts["Id"] == str(segment.token_ids[position])
        assert float(facts["Log-prob"]) == segment.logprobs[position]
        assert facts["Policy version"] == str(segment.policy_versions[position])
        assert (facts["Turn"], facts["Position"]) == ("1", str(position))


def test_the_keyboard_reaches_every_token_of_every_segment(browser: "Browser", written: Written) -> None:
    with opened(browser, written(render_rollout(long_rollout(2, 40, segments=2), decode))) as page:
        page.keyboard.press("Tab")
        assert page.evaluate("() => document.activeElement.className") == "skip"
        page.get_by_role("button", name="Tokens").click()
        assert page.locator(".segment-title").all_text_contents()[1].startswith("Segment 2 of 2: 40 tokens")
        page.locator("#stream").focus()
        shown = page.locator("#token div", has_text="Position").locator("dd")
        page.keyboard.press("ArrowRight")
        assert shown.text_content() == "0 in segment 1"
        for _ in range(3):
            page.keyboard.press("ArrowRight")
        page.keyboard.press("ArrowLeft")
        assert shown.text_content() == "2 in segment 1"
        assert "Log-prob" in (page.locator("#announce").text_content() or "")
        page.keyboard.press("End")
        assert shown.text_content() == "9 in segment 1"
        page.keyboard.press("ArrowDown")
        expect(page.locator(".current")).to_have_count(1)
        for _ in range(40):
            page.keyboard.press("End")
            page.keyboard.press("ArrowRight")
        assert shown.text_content() == "39 in segment 2"


def test_jump_between_turns_and_search_in_both_views(browser: "Browser", written: Written) -> None:
    with opened(browser, written(render_rollout(long_rollout(30, 6000), decode))) as page:
        page.get_by_label("Turn", exact=True).select_option(label="Turn 20 of 30")
        assert page.locator("article", has_text="Turn 20").first.evaluate("e => e.getBoundingClientRect().top") < 200
        page.get_by_role("button", name="Tokens").click()
        page.get_by_role("button", name="Next turn").click()
        expect(page.locator("#token div", has_text="Turn").locator("dd")).to_have_text("21")
        assert page.locator(".current").evaluate("e => e.getBoundingClientRect().top") < 800
        page.get_by_label("Search this trajectory").fill("forgets nothing")
        page.keyboard.press("Enter")
        assert (page.locator("#found").text_content() or "").startswith("1 of ")
        page.get_by_role("button", name="Conversation").click()
        page.get_by_label("Search this trajectory").fill("look at it")
        page.keyboard.press("Enter")
        page.keyboard.press("Enter")
        expect(page.locator("#found")).to_have_text("2 of 30 messages")
        page.get_by_label("Search this trajectory").fill("nowhere to be found")
        page.keyboard.press("Enter")
        expect(page.locator("#found")).to_have_text("nothing found")


def test_a_hundred_turns_of_64k_tokens_are_usable_at_once(browser: "Browser", written: Written) -> None:
    page_text = render_rollout(long_rollout(), decode)
    assert len(page_text.encode()) < 2_000_000
    address = written(page_text)
    started = time.monotonic()
    with opened(browser, address) as page:
        settle(page)
        loaded = time.monotonic() - started
        page.get_by_role("button", name="Tokens").click()
        settle(page)
        tokens = time.monotonic() - started - loaded
        page.get_by_label("Turn", exact=True).select_option(label="Turn 99 of 100")
        settle(page)
        jumped = time.monotonic() - started - loaded - tokens
        made = page.locator("#stream .t").count()
    assert made < 30_000, "only what is looked at is made"
    assert max(loaded, tokens, jumped) < 5, "one second is meant; a busy machine has five"


def test_results_open_on_means_and_a_row_for_each_problem(browser: "Browser", written: Written) -> None:
    results = [
        to_gym_result(rollout(), ROW | {"_ng_rollout_index": 0}),
        to_gym_result(rollout(score=Score(reward=0.0)), ROW | {"_ng_rollout_index": 1}),
        to_gym_result(failed(), ROW | {"_ng_rollout_index": 2}),
    ]
    with opened(browser, written(render_gym_results(results, decode))) as page:
        expect(page.locator("#tools")).to_be_hidden()
        means = page.get_by_role("table", name="Mean reward by environment")
        expect(means.locator("tbody tr")).to_have_text(["math0.5001 of 21"])
        chips = page.locator("#index .chip")
        expect(chips).to_have_text(["1", "0", "\N{EN DASH}"])
        page.get_by_label("only those without a reward above 0").check()
        expect(page.locator("#index .chip:visible")).to_have_count(2)
        expect(page.locator("#index output")).to_have_text("2 of 3 rollouts")
        page.get_by_label("Search all rollouts").fill("provider")
        expect(page.locator("#index .chip:visible")).to_have_count(1)
        page.get_by_role("link", name="math / 3 #2").click()
        expect(page.locator("#summary h1")).to_have_text("math / 3 #2")
        assert "masked (provider_unavailable)" in (page.locator("#summary").text_content() or "")
        page.go_back()
        expect(page.locator("#summary")).to_be_hidden()


def test_two_rollouts_stand_side_by_side_turn_by_turn(browser: "Browser", written: Written) -> None:
    prompt = Message(role="user", content="What is 6 times 7?")
    said = {name: [prompt, Message(role="assistant", content=text)] for name, text in (("a", "42"), ("b", "41"))}
    pair = [
        rollout(rollout_id="a", messages=said["a"], prompt_messages=1),
        rollout(rollout_id="b", messages=said["b"], prompt_messages=1, score=Score(reward=0.0, expected="42")),
    ]
    with opened(browser, written(render_rollout(pair[0], decode, pair[1]))) as page:
        turns = page.locator("#comparison .turn")
        expect(turns.nth(0)).to_contain_text("the same in both")
        expect(turns.nth(1)).to_contain_text("the first difference")
        expect(turns.nth(1).locator(".side").nth(0)).to_contain_text("42")
        expect(turns.nth(1).locator(".side").nth(1)).to_contain_text("41")
        page.get_by_role("button", name="Conversation").click()
        expect(page.locator("#comparison")).to_be_hidden()


def test_what_was_graded_is_shown(browser: "Browser", written: Written) -> None:
    report = "failed test 3: late\npassed a"
    score = Score(reward=0.0, detail={"why": "the answer differs"}, expected="42", report=report)
    record = rollout(score=score, submission=GradedSubmission(kind="answer", text=ATTACK), begun_at=0.0)
    with opened(browser, written(render_rollout(record, decode))) as page:
        expect(page.locator("#summary .reason")).to_have_text("the answer differs")
        expect(page.locator("#summary .answers dd")).to_have_text(["42", ATTACK])
        page.get_by_role("button", name="Graded").click()
        expect(page.locator("#graded section h2")).to_have_text(["Expected", "Got", "Test report"])
        expect(page.locator("#graded .diff-line.removed")).to_have_text("failed test 3: late\n")
        assert page.evaluate("() => window.ran") is None


def test_a_graded_patch_is_a_difference(browser: "Browser", written: Written) -> None:
    patch = f"diff --git a/x b/x\n--- a/x\n+++ b/x\n@@ -1 +1 @@\n-old\n+{ATTACK}\n"
    record = rollout(submission=GradedSubmission(kind="patch", text=patch))
    with opened(browser, written(render_rollout(record, decode))) as page:
        page.get_by_role("button", name="Graded").click()
        expect(page.locator(".diff-line.added")).to_have_text(f"+{ATTACK}\n")
        expect(page.locator(".diff-line.removed")).to_have_text("-old\n")
        expect(page.locator(".diff-line.file")).to_have_count(3)
        assert page.evaluate("() => window.ran") is None


@pytest.mark.slow
@pytest.mark.parametrize(("phone", "dark"), [(False, False), (False, True), (True, True)])
def test_it_is_accessible(browser: "Browser", written: Written, axe_rules: str, phone: bool, dark: bool) -> None:
    address = written(render_rollout(long_rollout(3, 150, segments=2), decode))
    with opened(browser, address, size=PHONE if phone else LAPTOP, dark=dark) as page:
        found = violations(page, axe_rules)
        page.get_by_role("button", name="Tokens").click()
        for colour in ("log-prob", "policy version", "mask"):
            page.get_by_label(colour, exact=True).check()
            page.get_by_role("button", name="Next turn").click()
            settle(page)
            found += violations(page, axe_rules)
        assert found == []
        assert overflow(page) <= 0


@pytest.mark.parametrize("dark", [False, True])
def test_overview_and_comparison_are_accessible(
    browser: "Browser", written: Written, axe_rules: str, dark: bool
) -> None:
    score = Score(reward=0.0, detail={"why": "late"}, expected="42", report="failed test 3: late\npassed test 1")
    patch = GradedSubmission(kind="patch", text="diff --git a/x b/x\n@@ -1 +1 @@\n-old\n+new\n")
    record = rollout(score=score, submission=patch)
    pages = [
        render_gym_results([to_gym_result(rollout(), ROW)] * 40, decode),
        render_rollout(record, decode, rollout()),
    ]
    for page_text in pages:
        with opened(browser, written(page_text), size=PHONE, dark=dark) as page:
            assert violations(page, axe_rules) == []
            assert overflow(page) <= 0
    with opened(browser, written(render_rollout(record, decode)), size=PHONE, dark=dark) as page:
        page.get_by_role("button", name="Graded").click()
        assert violations(page, axe_rules) == []
        assert overflow(page) <= 0
