"""Take the pictures of the pages that the documentation shows: ``python scripts/page_images.py`` (see .ci/chromium).

The service in them is the one that the tests of the pages use, the trajectory is made up.
"""

import random
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "pages")]

from chromium_pages import PHONE, chromium, opened, settle  # noqa: E402
from fake_service import TOKEN, busy, serving  # noqa: E402

from prorl_gym.inference.tokens.template_check import load_codec  # noqa: E402
from prorl_gym.pages.rollout_page import render_rollout  # noqa: E402
from prorl_gym.records import (  # noqa: E402
    NOT_SAMPLED,
    Generation,
    Message,
    Outcome,
    Rollout,
    Score,
    Segment,
    StageTime,
    ToolCall,
)
from prorl_gym.settings import RolloutSettings, resolve_settings  # noqa: E402

IMAGES = ROOT / "docs" / "images"
SCREEN = (1280, 820)
BOARD = (1280, 1780)

TURNS = (
    (
        "The test fails only when two readers ask at once. I look at how the ledger hands out cursors.",
        "rg -n 'def finish' -A 12 src/ledger.py",
        "src/ledger.py\n41:    def finish(self, record):\n42-        cursor = self._next\n"
        "43-        await self._write(record)\n44-        self._next += 1\n45-        return cursor\n",
    ),
    (
        "The cursor is read before the write and raised after it: two writers that meet at the await get the same one. "
        "The number has to be taken and raised in one step, before anything is awaited.",
        "python - <<'END'\nfrom pathlib import Path\n\npath = Path('src/ledger.py')\ntext = path.read_text()\n"
        "text = text.replace('cursor = self._next\\n', 'cursor, self._next = self._next, self._next + 1\\n')\n"
        "path.write_text(text.replace('        self._next += 1\\n', ''))\nEND\nmake test",
        "tests/test_ledger.py ...................                                 [ 61%]\n"
        "tests/test_stream.py ............                                        [100%]\n"
        "31 passed in 2.14s\n",
    ),
    ("The cursor is taken before the write now, so each record has its own. All 31 tests pass.", "", ""),
)


def sample() -> Rollout:
    """A rollout of three turns, in tokens of the tokenizer that ships with the package."""
    codec, rng = load_codec("small"), random.Random(3)
    messages = [
        Message(role="system", content="You work in a repository with a shell. Finish by saying what you did."),
        Message(
            role="user", content="tests/test_stream.py fails now and then: a record is missing. Find out why, mend it."
        ),
    ]
    ids: list[int] = []
    mask: list[int] = []
    calls: list[Generation] = []

    def append(text: str, sampled: bool) -> None:
        fresh = codec.tokenizer.encode_untrusted(text)
        ids.extend(fresh)
        mask.extend([int(sampled)] * len(fresh))

    append("".join(f"{message.role}\n{message.content}\n\n" for message in messages) + "assistant\n", False)
    for turn, (said, command, output) in enumerate(TURNS):
        start = len(ids)
        append(said + (f"\n<tool_call>\n{command}\n</tool_call>" if command else "") + "\n", True)
        facts = {"engine": f"policy-{turn % 2}", "seconds": 0.9 + turn, "cached_tokens": start - start % 16}
        calls.append(
            Generation.model_validate({"start": start, "end": len(ids), "turn": turn, "finish_reason": "stop", **facts})
        )
        call = ToolCall(id=f"c{turn}", name="shell", arguments=f'{{"command": {_quoted(command)}}}')
        messages.append(Message(role="assistant", content=said, tool_calls=(call,) if command else ()))
        if command:
            messages.append(Message(role="tool", content=output, name="shell", tool_call_id=call.id))
            append(f"tool\n{output}\nassistant\n", False)
    segment = Segment.model_validate(
        {
            "token_ids": ids,
            "mask": mask,
            "logprobs": [-(rng.expovariate(0.9) ** 2) / 3 if bit else 0.0 for bit in mask],
            "policy_versions": [101 + (i > calls[1].start + 40) if bit else NOT_SAMPLED for i, bit in enumerate(mask)],
            "generations": calls,
            **{"temperature": 1.0, "top_p": 1.0, "top_k": -1, "logprob_kind": "processed"},
        }
    )
    return Rollout(
        rollout_id="code-1249-7",
        run_id="grpo-7b",
        group_id="code-1249",
        group_size=8,
        replica=7,
        environment="code",
        outcome=Outcome(status="completed"),
        score=Score(reward=0.95, components={"tests": 1.0, "length": -0.05}, detail={"passed": 31, "failed": 0}),
        segments=[segment],
        messages=messages,
        prompt_messages=2,
        settings=resolve_settings(RolloutSettings()),
        stages={
            "init": StageTime(queued=1.1, seconds=0.6),
            "run": StageTime(queued=2.3, seconds=11.8),
            "eval": StageTime(queued=0.2, seconds=3.4),
        },
        accepted_at=1_760_000_000,
        finished_at=1_760_000_019.4,
    )


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'


def main() -> None:
    """Write the pictures."""
    IMAGES.mkdir(exist_ok=True)
    world = busy()
    world.pages = {"code-1249-7": render_rollout(sample(), load_codec("small").decode)}
    trajectory = IMAGES / ".trajectory.html"
    trajectory.write_text(world.pages["code-1249-7"], encoding="utf-8")
    with serving(world) as url, chromium() as browser:
        for name, size, dark in (("light", SCREEN, False), ("dark", SCREEN, True), ("phone", PHONE, False)):
            board = BOARD if name == "light" else size
            with opened(browser, f"{url}#token={TOKEN}", size=board, dark=dark) as page:
                page.get_by_role("button", name="10,000 finished", exact=True).wait_for()
                page.locator("#problems table").wait_for()
                page.locator("#groups table").wait_for()
                if dark:
                    page.locator("#list").scroll_into_view_if_needed()
                settle(page)
                page.screenshot(path=IMAGES / f"dashboard-{name}.png")
            with opened(browser, trajectory.as_uri(), size=size, dark=dark) as page:
                if name == "light":
                    page.screenshot(path=IMAGES / "trajectory-conversation.png")
                page.get_by_role("button", name="Tokens").click()
                page.get_by_label("policy version" if name == "phone" else "log-prob", exact=True).check()
                page.get_by_label("Turn", exact=True).select_option(label="Turn 2 of 3")
                settle(page)
                page.screenshot(path=IMAGES / f"trajectory-{name}.png")
    trajectory.unlink()


if __name__ == "__main__":
    main()
