"""Pages in a real Chromium: what they say on the console, what axe finds, how wide they are.

Playwright is imported with the browser's start: the tests are collected where it is not installed.
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Locator, LocatorAssertions, Page

PHONE = (390, 844)
LAPTOP = (1280, 800)

_LOOK = "() => new Promise((done) => requestAnimationFrame(() => setTimeout(done, 0)))"


@contextmanager
def chromium() -> "Iterator[Browser]":
    """Start the one that the distribution brings; as root it has no sandbox of its own."""
    from playwright.sync_api import sync_playwright

    options = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=options)
        try:
            yield browser
        finally:
            browser.close()


def expect(found: "Locator") -> "LocatorAssertions":
    """Return what waits until a statement about an element holds."""
    from playwright import sync_api

    return sync_api.expect(found)


@contextmanager
def opened(
    browser: "Browser", address: str, *, size: tuple[int, int] = LAPTOP, dark: bool = False, may_complain: bool = False
) -> "Iterator[Page]":
    """Open a page; at the end nothing may stand on its console, where browsers note every refusal too."""
    scheme = "dark" if dark else "light"
    context = browser.new_context(viewport={"width": size[0], "height": size[1]}, color_scheme=scheme)
    page = context.new_page()
    page.set_default_timeout(15_000)
    said: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.goto(address)
    try:
        yield page
        assert may_complain or said == []
    finally:
        context.close()


def settle(page: "Page") -> None:
    """Wait until what was asked of a page is on the screen."""
    page.evaluate(_LOOK)


def whole(page: "Page") -> None:
    """Wait until all that the dashboard has asked for is on it: its parts come one by one."""
    page.locator("#board[aria-busy=false]").wait_for()


def violations(page: "Page", rules: str) -> list[str]:
    """What axe-core finds wrong, rule by rule with the elements."""
    page.evaluate(rules)
    found: Any = page.evaluate("() => axe.run({iframes: false})")
    return [f"{one['id']}: {[node['target'] for node in one['nodes']][:3]}" for one in found["violations"]]


def overflow(page: "Page") -> int:
    """How many pixels a page is wider than the screen."""
    return int(page.evaluate("() => document.documentElement.scrollWidth - innerWidth"))
