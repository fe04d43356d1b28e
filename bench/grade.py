"""What grading costs, and how often it is wrong.

Speed of the math grader and of the code grader, what grading a repair costs around its tests, and false positives and
negatives on the labelled corpora in ``tests/corpora``, the half that was written without sight of the graders apart.

Code: 50 tests of one program and, on the host, as many runs of it and of an empty program, the floor.
"""

import asyncio
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from statistics import median
from typing import Any

from _load import percentile
from _report import SHORT, Figure, Peer, Report, figure, peer, report

sys.path.append(str(Path(__file__).parents[1] / "tests" / "corpora"))  # where ``grader_corpus`` is
from grader_corpus import (
    CodeExample,
    ConfusionCounts,
    MathExample,
    StemExample,
    count_confusion,
    extract_answer,
    is_rewarded,
    is_right_by_rules,
    read_corpus,
)

from prorl_gym.environments import registry
from prorl_gym.environments.answers.tex import NoAnswerError, last_boxed
from prorl_gym.environments.code.code_row import CodeRow
from prorl_gym.environments.code.environment import grade as grade_program
from prorl_gym.environments.math.environment import MathGrader
from prorl_gym.environments.row_format import read_rows
from prorl_gym.environments.stem.environment import StemGrader
from prorl_gym.environments.swe.controls.control_checks import ALLOWED_SECONDS
from prorl_gym.environments.swe.grading import GradeResult, grade_timed
from prorl_gym.environments.swe.swe_row import SweTask
from prorl_gym.environments.worker_pool import WorkerError, WorkerPool
from prorl_gym.errors import TaskError
from prorl_gym.rollout.scheduling.sandbox_leases import SandboxLeases
from prorl_gym.sandbox.backend_selection import open_backend
from prorl_gym.sandbox.config import SandboxConfig
from prorl_gym.sandbox.protocol import SandboxBackend, SandboxSpec
from prorl_gym.settings import resolve_settings

FOLDER = Path(__file__).parents[1] / "tests" / "corpora"
HALVES = ("seen", "unseen")
OUTSIDE = ("outside_seen", "outside_unseen")
FALSE_POSITIVES, FALSE_NEGATIVES_PERCENT = 0, 1.0
BARE_SECONDS = 5.0
"""CPU seconds of math-verify for an answer."""

Grader = Callable[[Any], Awaitable[bool]]


async def corpora() -> list[Figure]:
    return [*await math_figures(), *await stem_figures(), *await code_figures()]


async def math_figures() -> list[Figure]:
    """Return the figures of the math grader beside math-verify by its defaults and the comparison of strings."""
    pool = WorkerPool("prorl_gym.environments.math.answer_equality:grade")
    bare_pool = WorkerPool("bench._grade_bare:grade")
    grader = MathGrader(pool)

    async def ours(pair: MathExample) -> bool:
        answer = extract_answer(pair)
        try:
            return answer is not None and (await grader.score(pair.gold, answer)).reward == 1.0
        except TaskError:
            return False  # a gold answer that cannot be read rewards nothing

    async def bare(pair: MathExample) -> bool:
        message = pair.response.rpartition("</think>")[2]
        body = {"gold": pair.gold, "response": f"${message}$" if pair.bare else message}
        try:
            return bool((await bare_pool.call(body, cpu_seconds=BARE_SECONDS))["equal"])
        except WorkerError:
            return False  # it hangs or fails on the answer

    async def match(pair: MathExample) -> bool:
        return extract_answer(pair) == pair.gold

    graders: dict[str, Grader] = {"ours": ours, "math-verify": bare, "string match": match}
    with closing(pool), closing(bare_pool):
        return await _domain("math", "answers", MathExample, (*HALVES, *OUTSIDE), graders)


async def stem_figures() -> list[Figure]:
    quantities = WorkerPool("prorl_gym.environments.stem.quantity:grade")
    expressions = WorkerPool("prorl_gym.environments.math.answer_equality:grade")
    grader = StemGrader(quantities, MathGrader(expressions))

    async def ours(pair: StemExample) -> bool:
        return await is_right_by_rules(pair, grader)

    async def match(pair: StemExample) -> bool:
        try:
            return last_boxed(pair.answer) == pair.row["answer"]
        except NoAnswerError:
            return False

    graders: dict[str, Grader] = {"ours": ours, "string match": match}
    with closing(quantities), closing(expressions):
        return await _domain("stem", "answers", StemExample, (*HALVES, *OUTSIDE), graders)


async def code_figures() -> list[Figure]:
    backend = await open_backend(SandboxConfig(backend="userns"))

    async def ours(pair: CodeExample) -> bool:
        leases = SandboxLeases(backend)
        try:
            return await is_rewarded(pair, leases)
        finally:
            await leases.close()

    try:
        return await _domain("code", "programs", CodeExample, HALVES, {"ours": ours}, every=10 if SHORT else 1)
    finally:
        await backend.close()


async def _domain(
    domain: str, unit: str, example: Any, halves: tuple[str, ...], graders: Mapping[str, Grader], every: int = 1
) -> list[Figure]:
    figures: list[Figure] = []
    for half in halves:
        pairs = read_corpus(FOLDER / f"{domain}_{half}.jsonl", example)[::every]
        found = {name: await _count(pairs, grader) for name, grader in graders.items()}
        own = found.pop("ours")
        # The unseen half of two domains was looked at, and mended by, after its first run.
        mended = half.endswith("unseen") and domain != "code"
        name = f"{domain}, {half.replace('_', ', ')} half" + (", mended since first sight" if mended else "")
        figures += [
            figure(
                f"{name} ({own.positives} right and {own.negatives} wrong {unit}): false positives",
                *([len(own.false_positives)], ""),
                target=FALSE_POSITIVES,
                peers=[_peer(name, len(each.false_positives)) for name, each in found.items()],
            ),
            figure(
                f"{name}: false negatives",
                *([100 * own.false_negative_rate], "%"),
                target=FALSE_NEGATIVES_PERCENT,
                peers=[_peer(name, 100 * each.false_negative_rate) for name, each in found.items()],
            ),
        ]
    return figures


async def _count(pairs: Any, grader: Grader) -> ConfusionCounts[Any]:
    """Grade some pairs, two at a time."""
    turns = asyncio.Semaphore(2)

    async def one(pair: Any) -> bool:
        async with turns:
            return await grader(pair)

    return count_confusion(pairs, await asyncio.gather(*map(one, pairs)))


def _peer(name: str, value: float) -> Peer:
    return Peer(name=name, value=value, target=None)


GRADINGS = 100 if SHORT else 1000
P50_MS, P99_MS = 5.0, 200.0


async def math_speed() -> list[Figure]:
    pairs = [pair for half in HALVES for pair in read_corpus(FOLDER / f"math_{half}.jsonl", MathExample)]
    found = [(pair.gold, answer) for pair in pairs if (answer := extract_answer(pair)) is not None]
    with closing(WorkerPool("prorl_gym.environments.math.answer_equality:grade")) as pool:
        times = await gradings(MathGrader(pool), [found[index % len(found)] for index in range(GRADINGS)])
    what = f"of {GRADINGS} gradings, two at a time"
    return [
        figure(f"math: p50 {what}", [median(times)], "ms", target=P50_MS),
        figure(f"math: p99 {what}", [percentile(times, 99)], "ms", target=P99_MS),
    ]


async def gradings(grader: MathGrader, answers: Sequence[tuple[str, str]]) -> list[float]:
    """Return ms of every grading, by two callers at the same time, workers already started."""
    await asyncio.gather(grader.score("1", "2"), grader.score("1", "3"))
    left = list(reversed(answers))
    times: list[float] = []

    async def caller() -> None:
        while left:
            gold, answer = left.pop()
            began = time.perf_counter()
            await grader.score(gold, answer)
            times.append((time.perf_counter() - began) * 1000)

    await asyncio.gather(caller(), caller())
    return times


TESTS = 50
ROUNDS = 3 if SHORT else 15
TARGET_RATIO = 1.5
STDIO = "n = int(input())\nprint(sum(i * i for i in range(n)))\n"
FUNCTION = "def squares(n):\n    return sum(i * i for i in range(n))\n"
CALL = FUNCTION + "\n\nimport json\nprint(json.dumps(squares(json.loads(input()))))\n"
"""The same work on the host: arguments and result as JSON."""


def code_rows() -> dict[str, tuple[CodeRow, str, str]]:
    answers = [(n, sum(i * i for i in range(n))) for n in range(TESTS)]
    stdio = [{"stdin": f"{n}\n", "stdout": f"{answer}\n"} for n, answer in answers]
    function = [{"args": [n], "expected": answer} for n, answer in answers]
    made = {
        "stdin and stdout": ({"kind": "stdio", "cases": stdio}, STDIO, STDIO),
        "function": ({"kind": "function", "entry": "squares", "cases": function}, FUNCTION, CALL),
    }
    return {
        name: (CodeRow.model_validate({"question": "?", "tests": tests}), program, alone)
        for name, (tests, program, alone) in made.items()
    }


async def grade_ms(backend: SandboxBackend, row: CodeRow, program: str) -> float:
    leases = SandboxLeases(backend)
    began = time.perf_counter()
    try:
        score = await grade_program(row, program, leases, 300.0)
    finally:
        await leases.close()
    took = (time.perf_counter() - began) * 1000
    if score.reward != 1.0:
        raise RuntimeError(f"a right program failed: {score.detail}")
    return took


def host_ms(python: str, program: str) -> float:
    """Return the ms of running a program once per test on the host, one after another."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "solution.py")
        path.write_text(program, encoding="utf-8")
        began = time.perf_counter()
        for n in range(TESTS):
            subprocess.run([python, str(path)], input=f"{n}\n".encode(), capture_output=True, check=True)
        return (time.perf_counter() - began) * 1000


async def interpreter(backend: SandboxBackend) -> str:
    """Return the path of the sandbox's python3, which the host's ``/usr`` also has."""
    sandbox = await backend.start_sandbox(SandboxSpec())
    try:
        result = await sandbox.exec(["python3", "-c", "import sys; print(sys.executable)"], timeout=60)
    finally:
        await sandbox.close()
    return result.stdout.decode().strip()


async def code_speed() -> list[Figure]:
    """Measure both kinds of tests; ours and the peers in turns, so that noise hits all of them."""
    backend = await open_backend(SandboxConfig(backend="userns"))
    figures: list[Figure] = []
    try:
        python = await interpreter(backend)
        for name, (row, program, alone) in code_rows().items():
            graded: list[float] = []
            host: list[float] = []
            floor: list[float] = []
            for _ in range(ROUNDS):
                graded.append(await grade_ms(backend, row, program))
                host.append(host_ms(python, alone))
                floor.append(host_ms(python, ""))
            figures.append(
                figure(
                    f"{TESTS} tests of one program, {name}",
                    graded,
                    "ms",
                    backend="userns",
                    peers=[peer("plain python on the host", host), peer("empty program on the host", floor)],
                )
            )
            figures.append(
                figure(
                    f"{TESTS} tests of one program, {name}: beside plain python",
                    [mine / theirs for mine, theirs in zip(graded, host, strict=True)],
                    "x",
                    backend="userns",
                    target=TARGET_RATIO,
                )
            )
    finally:
        await backend.close()
    return figures


ROWS = Path(__file__).parents[1] / "environments" / "prorl_swe" / "data" / "example.jsonl"
RUNS = 2 if SHORT else 20
TARGET_MS = 300.0


async def swe_cost() -> list[Figure]:
    environment = registry.get("swe")
    settings = resolve_settings(environment.settings)
    backend = await open_backend(SandboxConfig(backend="userns"))
    around: list[float] = []
    shares: list[float] = []

    async def grade(task: SweTask) -> GradeResult:
        leases = SandboxLeases(backend)
        try:
            return await grade_timed(task, task.gold_patch.encode(), leases, settings)
        finally:
            await leases.close()

    try:
        for row in read_rows(ROWS):
            task = environment.parse_row(row.task)
            await grade(task)  # proves the controls of the row before the clock runs
            for _ in range(RUNS):
                graded = await grade(task)
                if graded.score.reward != 1.0:
                    raise RuntimeError(f"{row.name}: gold scores {graded.score.reward} ({graded.score.detail})")
                around.append(1000 * (graded.seconds - graded.tests_seconds - graded.checks_seconds))
                shares.append(graded.checks_seconds / max(ALLOWED_SECONDS, graded.tests_seconds / 2))
    finally:
        await backend.close()
    what = f"p50 of {len(around)} gradings"
    limit = "SWE: controls, most of what is allowed (half of run A, or 5 s)"
    return [
        figure(f"SWE: around the tests, {what}", [median(around)], "ms", target=TARGET_MS),
        figure(limit, [max(shares)], "", target=1.0),
    ]


PARTS = (math_speed, code_speed, swe_cost, corpora)


async def measure_all() -> list[Figure]:
    return [each for part in PARTS for each in await part()]


def run() -> Report:
    return report("grade", asyncio.run(measure_all()), "math-verify", "sympy")
