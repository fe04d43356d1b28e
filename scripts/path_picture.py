"""Draw ``docs/images/path.svg``, the path of a rollout: ``python scripts/path_picture.py``."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from svg import CARD, QUIET, box, document, line, text

IMAGE = Path(__file__).parent.parent / "docs" / "images" / "path.svg"
WIDTH, HEIGHT = 960, 378
SERVICE, BLUE, AMBER, GREEN = "#eef3fb", "#dbe7fb", "#fdf0d5", "#dff3e4"

STAGES = (
    (204, "1  accept", ("on disk before the", "answer; an id is", "accepted once"), CARD),
    (352, "2  INIT", ("parse the row,", "make the prompt,", "set up a sandbox"), BLUE),
    (500, "3  RUN", ("the agent loop:", "ids to the engine,", "tools, ids appended"), AMBER),
    (648, "4  EVAL", ("grade, in a clean", "sandbox that the", "agent never saw"), GREEN),
)


def shapes() -> Iterator[str]:
    """Yield the parts of the picture."""
    yield line((888, 116), (888, 28), (80, 28), (80, 114), color=QUIET, width=1.5, arrow="end")
    yield text(
        484, 20, "one terminal record for each id: streamed, kept until it is acknowledged", size=12, anchor="middle"
    )

    yield from card(16, 116, 128, 112, "Trainer", ("NeMo Gym, or any", "client of the", "HTTP API"), CARD)
    yield box(184, 52, 616, 190, fill=SERVICE, round_by=10)
    yield text(202, 80, "prorl-gym", bold=True, size=14)
    yield text(784, 80, "each stage has slots and a deadline clock of its own", anchor="end", size=12, color=QUIET)
    for x, name, lines, fill in STAGES:
        yield from card(x, 116, 132, 92, name, lines, fill)
    yield from card(
        824, 116, 128, 112, "5  record", ("token ids, mask,", "log-probs, versions;", "a reward, or none"), CARD
    )
    for x, end in ((144, 202), (336, 350), (484, 498), (632, 646), (780, 822)):
        yield line((x, 160), (end, 160), color=QUIET, width=1.5, arrow="end")

    yield from card(
        270, 282, 290, 84, "Inference engines", ("vLLM, SGLang, NeMo-RL's server:", "exact token ids in and out"), AMBER
    )
    yield line((540, 210), (540, 280), color=QUIET, width=1.5, arrow="both")
    yield from card(
        584,
        282,
        290,
        84,
        "Rootless sandboxes",
        ("namespaces, limits, no network;", "one for the agent, clean ones for grading"),
        GREEN,
    )
    for x in (604, 714):
        yield line((x, 210), (x, 280), color=QUIET, width=1.5, arrow="both")


def card(x: float, y: float, width: float, height: float, name: str, lines: Sequence[str], fill: str) -> Iterator[str]:
    """Yield a box with a name and some lines."""
    yield box(x, y, width, height, fill=fill)
    yield text(x + width / 2, y + 24, name, bold=True, anchor="middle", size=14)
    for number, words in enumerate(lines):
        yield text(x + width / 2, y + 45 + 17 * number, words, anchor="middle", size=12, color=QUIET)


def picture() -> str:
    """Return the picture."""
    return document(WIDTH, HEIGHT, "The path of a rollout: accept, INIT, RUN, EVAL, record", list(shapes()))


if __name__ == "__main__":
    IMAGE.write_text(picture(), encoding="utf-8")
