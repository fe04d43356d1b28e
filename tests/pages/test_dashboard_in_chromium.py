"""The dashboard as a browser has it, against a service on a real socket."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
from chromium_pages import LAPTOP, PHONE, opened, overflow, violations, whole
from fake_service import TOKEN, World, busy, serving
from long_rollouts import ATTACK, decode, long_rollout

from prorl_gym.pages.rollout_page import render_rollout

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = [pytest.mark.chromium, pytest.mark.slow]


@pytest.fixture(scope="module")
def trajectory() -> str:
    return render_rollout(long_rollout(4, 1200), decode)


@contextmanager
def shown(browser: "Browser", world: World, **looks: Any) -> "Iterator[Page]":
    """Open the dashboard of a world, with its token."""
    with serving(world) as url, opened(browser, f"{url}#token={TOKEN}", **looks) as page:
        page.locator(".rows .row").first.wait_for()
        whole(page)
        yield page


def plain(world: World) -> World:
    """A world in which every rollout has a page."""
    world.pages = {one["rollout_id"]: "<!doctype html><title>plain</title><h1>plain</h1>" for one in world.members}
    return world


def look_again(page: "Page") -> None:
    page.get_by_role("button", name="Pause").click()
    page.get_by_role("button", name="Pause").click()


def test_the_token_stays_in_the_tab(browser: "Browser") -> None:
    world = busy(20)
    with serving(world) as url, opened(browser, f"{url}#token={TOKEN}") as page:
        page.get_by_text("ready", exact=True).wait_for()
        assert page.url == url
        page.reload()
        page.get_by_text("ready", exact=True).wait_for()
        page.get_by_role("button", name="Sign out").click()
        assert page.get_by_role("textbox", name="Token").is_visible()
        assert page.evaluate("() => sessionStorage.length") == 0
    assert not [asked for asked in world.asked if TOKEN in asked]


def test_a_token_is_asked_for_and_a_wrong_one_refused(browser: "Browser") -> None:
    world = busy(20)
    with serving(world) as url, opened(browser, url, may_complain=True) as page:
        page.get_by_role("textbox", name="Token").fill("wrong")
        page.keyboard.press("Enter")
        page.get_by_text("The bearer token is missing or wrong.").wait_for()
        page.get_by_role("textbox", name="Token").fill(TOKEN)
        page.keyboard.press("Enter")
        page.get_by_text("ready", exact=True).wait_for()


def test_the_status_of_the_service_is_on_the_page(browser: "Browser") -> None:
    with shown(browser, busy(50)) as page:
        text = " ".join(page.locator("#board").all_inner_texts())
        for said in ("41.8M", "781 MiB", "4 of 5", "quarantined: log-probs differ from the reference by 0.31"):
            assert said in text
        for said in ("101", "turns 4-7", "4.0e-4"):
            assert said in page.get_by_label("Mismatch of log-probs by run").inner_text()
        for said in ("decided: ready", "41 of 64 wanted", "policy-3", "judge: judge-0"):
            assert said in text
        assert page.locator("#charts .chart:visible").count() == 7
        page.get_by_label("Run of the groups").select_option("eval-17")
        page.get_by_text("The run has no demand").wait_for()


def finished(page: "Page", number: str) -> None:
    """Wait until the list has so many finished rollouts, and the rest of the page agrees with it."""
    page.get_by_role("button", name=f"{number} finished", exact=True).wait_for()
    whole(page)


def test_the_numbers_of_the_page_agree(browser: "Browser") -> None:
    with shown(browser, busy(50)) as page:
        tiles = page.locator("#tiles .tile")
        for state, number in (("Waiting", "16"), ("Running", "8"), ("Finished", "50")):
            assert tiles.filter(has_text=state).locator("dd").evaluate("dd => dd.firstChild.data") == number
            assert page.get_by_role("button", name=f"{number} {state.lower()}", exact=True).is_visible()
        page.get_by_label("Environment", exact=True).select_option("swe")
        page.get_by_role("button", name="0 waiting", exact=True).wait_for()
        assert tiles.filter(has_text="Waiting").locator("dd").evaluate("dd => dd.firstChild.data") == "16"


def test_whether_reward_rose_between_two_versions(browser: "Browser") -> None:
    world = busy(2999)
    for one in world.members:
        if one["reward"] is not None and one["environment"] == "math":
            one["reward"] = float(one["cursor"] % 4 <= one["oldest_version"] - 100)
    with shown(browser, world) as page:
        table = page.get_by_role("region", name="Mean rewards by version")
        math = table.locator("tr", has_text="grpo-7b math")
        assert "rose" in math.inner_text()
        page.get_by_label("From version").select_option("102")
        page.get_by_label("To version").select_option("101")
        table.locator("tr", has_text="grpo-7b math").locator("b", has_text="fell").wait_for()
        assert page.url.endswith("#from=102&to=101")
        plot = page.get_by_label("Reward by policy version: policy version")
        plot.focus()
        page.keyboard.press("Home")
        assert (plot.get_attribute("aria-valuetext") or "").startswith("version 100: ")


def test_a_cause_chooses_the_rollouts_that_ended_so(browser: "Browser") -> None:
    world = busy(400)
    with shown(browser, world) as page:
        causes = page.get_by_role("region", name="Causes", exact=True)
        row = causes.locator("tr").filter(has=page.get_by_role("button", name="the answer differs", exact=True))
        row.get_by_role("button", name="the answer differs", exact=True).click()
        zeros = [one for one in world.members if one["reward"] == 0 and one["why"] == "the answer differs"]
        finished(page, str(len(zeros)))
        assert row.locator("td").nth(1).inner_text() == f"{len(zeros)}"
        assert "never solved" not in page.locator("#problems").inner_text(), "others may be solved"
        assert causes.evaluate("box => box.scrollWidth <= box.clientWidth"), "the table is wider than its card"
        row.get_by_role("button", name="math, completed").click()
        wanted = [one for one in zeros if one["environment"] == "math" and one["status"] == "completed"]
        assert 0 < len(wanted) < len(zeros)
        finished(page, str(len(wanted)))
        assert page.locator("#problems tbody tr").count() <= len({one["row_id"] for one in wanted})
        page.reload()  # the view is in the address
        finished(page, str(len(wanted)))
        page.get_by_role("button", name="Take away: why the answer differs").click()
        page.get_by_role("button", name="Show all").click()
        finished(page, "400")
        page.go_back()
        page.get_by_role("button", name="Show all").wait_for()


def test_a_problem_that_is_never_solved_stands_first(browser: "Browser") -> None:
    world = plain(busy(900))
    with shown(browser, world) as page:
        row = page.locator("#problems tbody tr").first
        row.wait_for()
        assert "never, of" in row.inner_text()
        row.locator(".chip").first.click()
        page.frame_locator("#trajectory").locator("h1").wait_for()
        page.get_by_role("button", name="Close").click()
        row.locator("th button").click()
        page.get_by_role("button", name="Take away: problem").wait_for()
        page.wait_for_function("() => document.querySelectorAll('#problems tbody tr').length <= 2")  # one in each run


def test_two_rollouts_of_a_problem_are_compared(browser: "Browser") -> None:
    world = plain(busy(900))
    with shown(browser, world) as page:
        page.locator("#problems tbody tr").first.wait_for()
        page.get_by_role("button", name="Compare two").click()
        chips = page.locator("#problems tbody tr").first.locator(".chip")
        chips.nth(0).click()
        page.get_by_text("Choose the second rollout.").wait_for()
        chips.nth(1).click()
        page.frame_locator("#trajectory").locator("h1").wait_for()
        asked = [one for one in world.asked if "beside=" in one]
        assert len(asked) == 1
        assert "rollout=" in page.url and "beside=" in page.url


def test_the_list_sorts_by_any_column(browser: "Browser") -> None:
    world = busy(600)
    with shown(browser, world) as page:
        for column, key in (("Tokens", "sampled_tokens"), ("Turns", "turns")):
            head = page.get_by_role("columnheader", name=column)
            head.get_by_role("button").click()
            most = max(world.members, key=lambda one: (one[key], one["cursor"]))
            page.locator(".rows .row").first.filter(has_text=most["rollout_id"]).wait_for()
            assert head.get_attribute("aria-sort") == "descending"
            head.get_by_role("button").click()
            page.locator('[role=columnheader][aria-sort="ascending"]').wait_for()
        page.get_by_label("Sort by").select_option("took")
        page.get_by_role("columnheader", name="Took").and_(page.locator("[aria-sort]")).wait_for()
        assert "p90" in page.locator("#spreads").inner_text()


def test_what_waits_and_what_runs(browser: "Browser") -> None:
    world = busy(60)
    with shown(browser, world) as page:
        page.get_by_role("button", name="16 waiting", exact=True).click()
        page.locator(".rows .row", has_text="in the queue").first.wait_for()
        ages = sorted((one for one in world.pending if one["place"] != "run"), key=lambda one: one["accepted_at"])
        assert page.locator(".rows .row").count() == 16
        assert page.get_by_label("Sort by").input_value() == "took"
        assert "16 in the queue" in page.locator("#tiles .tile", has_text="Waiting").inner_text()
        assert (page.locator(".rows .row .cell.id").first.text_content() or "") == ages[0]["rollout_id"]
        page.locator("#spreads dt", has_text="Accepted for").wait_for()
        assert "p90" in page.locator("#spreads").inner_text()
        page.get_by_role("button", name="8 running", exact=True).click()
        page.locator(".rows .row", has_text="RUN").first.wait_for()
        assert page.url.endswith("#state=running")


def test_ten_thousand_rollouts(browser: "Browser") -> None:
    world = plain(busy(10_000))
    with shown(browser, world) as page:
        finished(page, "10,000")
        rows, grid = page.locator(".rows .row"), page.locator("#rows")
        assert rows.count() < 80
        assert grid.get_attribute("aria-rowcount") == "10001"
        grid.focus()
        page.keyboard.press("End")
        last = page.locator(".rows .row.active", has_text=world.members[0]["rollout_id"])
        last.wait_for()
        assert (last.get_attribute("aria-rowindex"), last.get_attribute("aria-selected")) == ("10001", "true")
        page.get_by_label("Environment", exact=True).select_option("swe")
        page.get_by_label("Reward", exact=True).select_option("none")
        wanted = [one for one in world.members if one["environment"] == "swe" and one["reward"] is None]
        finished(page, f"{len(wanted):,}")
        page.get_by_placeholder("id, problem or reason").fill(wanted[-1]["rollout_id"])
        finished(page, "1")
        assert rows.count() == 1


def test_new_rollouts_come_in_above_the_chosen_one(browser: "Browser") -> None:
    world = busy(2000)
    kept, world.members = world.members, world.members[:1500]
    with shown(browser, world) as page:
        grid, active = page.locator("#rows"), page.locator(".rows .row.active .cell.id")
        grid.focus()
        page.keyboard.press("ArrowDown")
        chosen = active.text_content() or "nothing"
        world.members = kept
        look_again(page)
        finished(page, "2,000")
        assert len({one["cursor"] for one in kept}) == 2000
        assert grid.get_attribute("aria-rowcount") == "2001"
        grid.focus()
        page.keyboard.press("ArrowUp")
        page.keyboard.press("ArrowDown")
        page.locator(".rows .row.active", has_text=chosen).wait_for()


def test_a_trajectory_opens_in_a_frame_of_its_own(browser: "Browser", trajectory: str) -> None:
    world = busy(20)
    newest = world.members[-1]["rollout_id"]
    world.pages = {newest: trajectory}
    with shown(browser, world) as page:
        page.locator("#rows").focus()
        page.keyboard.press("Enter")
        frame = page.frame_locator("#trajectory")
        frame.get_by_role("button", name="Tokens").click()
        assert frame.locator("#stream .t").count() >= 150
        assert page.url.endswith(f"#rollout={newest}")
        with page.expect_download() as download:
            page.get_by_role("button", name="Save").click()
        assert download.value.suggested_filename == f"{newest}.html"
        assert download.value.path().read_text("utf-8") == trajectory
        page.get_by_role("button", name="Close").click()
        assert not page.locator("#viewer").is_visible()
        assert page.evaluate("() => document.activeElement.id") == "rows"


def test_a_page_in_the_frame_can_neither_run_nor_reach_the_token(browser: "Browser") -> None:
    world = busy(20)
    attack = "<!doctype html><h1>hostile</h1><script>parent.ran = 1; top.ran = 1; document.title = 'ran'</script>"
    world.pages = {world.members[-1]["rollout_id"]: attack}
    with serving(world) as url, opened(browser, f"{url}#token={TOKEN}", may_complain=True) as page:
        with page.expect_console_message(lambda message: "script-src" in message.text):
            page.locator(".rows .row").first.click()
            page.frame_locator("#trajectory").locator("h1").wait_for()
        frame = page.frames[1]
        assert frame.evaluate("() => [origin, document.title]") == ["null", ""]
        assert "SecurityError" in frame.evaluate(
            "() => { try { return sessionStorage.length } catch (e) { return e.name } }"
        )
        assert page.evaluate("() => window.ran") is None


def test_hostile_names_are_shown_and_do_not_run(browser: "Browser") -> None:
    world = busy(20)
    words = ("run_id", "group_id", "environment", "status", "detail", "row_id", "why")
    world.members = [
        one | {name: ATTACK for name in words} | {"rollout_id": f"{ATTACK}{i}", "reward": 0.0}
        for i, one in enumerate(world.members)
    ]
    world.pending = [
        one | {"environment": ATTACK, "run_id": ATTACK, "rollout_id": f"{ATTACK}p{i}"}
        for i, one in enumerate(world.pending)
    ]
    world.groups = {ATTACK: world.groups["grpo-7b"]}
    world.status |= {"version": ATTACK, "problem": ATTACK, "ready": False}
    world.status["pools"][0] |= {"name": ATTACK}
    world.status["pools"][0]["engines"][0] |= {"name": ATTACK, "unhealthy_reason": ATTACK}
    world.history["columns"] = {f"engine.{ATTACK}.in_flight": [1.0] * len(world.history["times"])}
    world.pages = {
        world.members[-1]["rollout_id"]: render_rollout(long_rollout(1, 10, text=ATTACK), lambda ids: ATTACK)
    }
    with shown(browser, world) as page:
        page.locator("#groups table").wait_for()
        page.locator("#causes th button", has_text=ATTACK).first.click()
        page.get_by_role("button", name="Take away: why").wait_for()
        page.locator(".rows .row").first.click()
        frame = page.frame_locator("#trajectory")
        assert ATTACK in (frame.locator("h1").text_content() or "")
        assert page.evaluate("() => window.ran") is None
        assert page.frames[1].evaluate("() => window.ran") is None
        assert page.locator("img").count() == frame.locator("img").count() == 0


def test_an_outage_is_said_and_passes(browser: "Browser") -> None:
    world = busy(20)
    with serving(world) as url, opened(browser, f"{url}#token={TOKEN}", may_complain=True) as page:
        page.get_by_text("ready", exact=True).wait_for()
        page.locator(".rows .row").nth(19).wait_for()
        world.down = True
        look_again(page)
        page.get_by_text("The service is stopping. Ask again when it is back.").wait_for()
        assert page.locator(".rows .row").count() == 20
        world.down = False
        look_again(page)
        page.get_by_text("ready", exact=True).wait_for()
        page.locator("#trouble").wait_for(state="hidden")  # what the last question of a look brings
        page.locator(".rows .row").first.click()
        page.get_by_text("there is none.").wait_for()
        page.keyboard.press("Escape")
        page.locator("#viewer").wait_for(state="hidden")


def test_a_dead_engine_is_seen_at_once(browser: "Browser") -> None:
    world = busy(20)
    world.status |= {"problem": "0 of 1 engines of pool policy serve: the connection was refused. Start them."}
    with shown(browser, world) as page:
        badge = page.locator("#health")
        assert badge.text_content() == "0 of 1 engines of pool policy serve"
        assert "bad" in (badge.get_attribute("class") or "")
        page.get_by_text("the connection was refused. Start them.").wait_for()


def test_a_service_that_has_done_nothing_yet(browser: "Browser") -> None:
    world = busy(0)
    world.status |= {"ended": [], "rewards": [], "pools": [], "sandboxes": None, "event_loop_lag_seconds": None}
    world.history |= {"times": [], "columns": {}}
    with serving(world) as url, opened(browser, f"{url}#token={TOKEN}") as page:
        page.get_by_text("No run has finished a rollout yet.").wait_for()
        page.locator("#rows").press("ArrowDown")
        page.locator("#rows").press("Enter")
        finished(page, "0")


@pytest.mark.parametrize(("phone", "dark"), [(False, False), (False, True), (True, True)])
def test_it_is_accessible(browser: "Browser", trajectory: str, axe_rules: str, phone: bool, dark: bool) -> None:
    world = busy(200)
    world.pages = {world.members[-1]["rollout_id"]: trajectory}
    size = PHONE if phone else LAPTOP
    with serving(world) as url, opened(browser, url, size=size, dark=dark) as page:
        found = violations(page, axe_rules)
        page.goto(f"{url}?#token={TOKEN}")
        page.locator("#groups table").wait_for()
        page.locator("#problems table").wait_for()
        page.locator("#rows").focus()
        page.keyboard.press("ArrowDown")
        found += violations(page, axe_rules)
        assert overflow(page) <= 0
        page.locator(".rows .row").first.click()
        page.frame_locator("#trajectory").locator("h1").wait_for()
        found += violations(page, axe_rules)
        page.get_by_role("button", name="Close").click()
        page.locator("#causes th button").first.click()
        page.get_by_role("button", name="Compare two").click()
        page.get_by_role("button", name="waiting").last.click()
        page.get_by_role("button", name="Show all").wait_for()
        found += violations(page, axe_rules)
        assert overflow(page) <= 0
        assert found == []
