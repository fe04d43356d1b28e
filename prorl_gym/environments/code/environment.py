"""The ``code`` environment: write a program, try it in a sandbox, hand in its source."""

from collections.abc import Iterator, Sequence

from prorl_gym.agents.protocol import Artifacts, Tool
from prorl_gym.agents.tools import BashTool, FinishTool, PythonTool
from prorl_gym.agents.tools.agent_sandbox import SandboxSource
from prorl_gym.environments.code.code_row import CodeRow, FunctionTests
from prorl_gym.environments.code.grader import failed_score, grade
from prorl_gym.environments.protocol import Leases
from prorl_gym.environments.simple import SimpleEnvironment
from prorl_gym.records import GradedSubmission, Message, Score
from prorl_gym.sandbox.protocol import SandboxLimits, SandboxSpec
from prorl_gym.settings import ResolvedSettings, RolloutSettings

_SYSTEM_PROMPT = (
    "You write Python programs. You have a sandbox with bash and python to explore and to test your program in. When "
    "it works, call finish with the complete source of the program as the answer. Your program is then run on hidden "
    "tests in a fresh sandbox that holds none of your files, with the standard library only and limits on time and "
    "memory."
)

_CPP_PROMPT = _SYSTEM_PROMPT.replace("Python programs", "C++17 programs").replace(
    "run on hidden", "compiled with g++ -O2 and run on hidden"
)

EVAL_SHARE = 0.8
"""Share of the stage's deadline that the tests may use; the rest is for starting the sandbox."""


class CodeEnvironment(SimpleEnvironment[CodeRow]):
    """Implements ``Environment[CodeRow]``."""

    name = "code"
    row_model = CodeRow
    settings = RolloutSettings(max_turns=16, eval_seconds=300.0)
    sandbox = SandboxSpec(limits=SandboxLimits(output=16 << 10))
    gold_field = "solution"

    def messages(self, task: CodeRow) -> tuple[Message, ...]:
        """Return the prompt for the row's language."""
        system = _CPP_PROMPT if task.language == "cpp" else _SYSTEM_PROMPT
        return Message(role="system", content=system), Message(role="user", content=_prompt(task))

    def tools(self, sandbox: SandboxSource, settings: ResolvedSettings) -> Sequence[Tool]:
        """Return ``bash``, ``python`` and ``finish``."""
        return (
            BashTool(sandbox, settings.action_seconds),
            PythonTool(sandbox, settings.action_seconds),
            FinishTool("Hand in the complete source of your program and end."),
        )

    def normalize_answer(self, text: str) -> str:
        """Return it as it is; see ``SupportsReplay``."""
        return text

    async def evaluate(self, task: CodeRow, artifacts: Artifacts, leases: Leases, settings: ResolvedSettings) -> Score:
        """Run the handed-in program on the hidden tests.

        Raises:
            SandboxError, GraderError, TaskError: grading itself could not be done.
        """
        answer = artifacts.answer or ""
        artifacts.submission = GradedSubmission(kind="program", text=answer)
        try:
            program = find_program(answer, task.language)
        except NoProgramError as complaint:
            return failed_score(str(complaint), 0, len(task.tests.cases))
        artifacts.submission = GradedSubmission(kind="program", text=program)
        return await grade(task, program, leases, settings.eval_seconds * EVAL_SHARE)

    def wrong_answer(self, task: CodeRow, seed: int) -> str:
        """Return a program that prints a number of the seed."""
        if task.language == "cpp":
            return f'#include <cstdio>\nint main() {{ puts("seed {seed}"); }}\n'
        name = task.tests.entry.split(".")[0] if isinstance(task.tests, FunctionTests) else "main"
        return f"def {name}(*arguments):\n    return 'seed {seed}'\n\n\nprint('seed {seed}')\n"


def _prompt(task: CodeRow) -> str:
    """The question and what the tests will do; the same for every replica."""
    if isinstance(task.tests, FunctionTests):
        form = f"Your program must define `{task.tests.entry}`, which the tests call."
        if task.tests.result != "return":
            form += f" It works in place: its {task.tests.result} is looked at after the call."
    else:
        form = "Your program must read standard input and print to standard output."
    limits = f"Limits for each test: {task.time_limit:g} s of CPU time, {task.memory_limit >> 20} MiB of memory."
    start = (
        f"\n\nStart from this code:\n```{task.language}\n{task.starter_code.strip()}\n```" if task.starter_code else ""
    )
    return f"{task.question}{start}\n\n{form} {limits}"


MAX_PROGRAM = 256 << 10
"""Longest program that is run, in bytes."""

_FENCE = "```"
_FENCE_NAMES = {"python": ("python", "py", "python3", ""), "cpp": ("cpp", "c++", "cc", "cxx", "cplusplus", "c", "")}
_DISPLAY_NAMES = {"python": "Python", "cpp": "C++"}


class NoProgramError(ValueError):
    """The answer has no program to run; the message has the reason."""


def find_program(answer: str, language: str = "python") -> str:
    """Return the last fenced block of the language, or the whole answer when nothing in it is fenced.

    Raises:
        NoProgramError: empty, too long, or fenced as another language only.
    """
    if len(answer) > 4 * MAX_PROGRAM:
        raise NoProgramError(f"the answer is longer than {4 * MAX_PROGRAM} characters")
    blocks = list(_blocks(answer))
    programs = [body for name, body in blocks if name in _FENCE_NAMES[language]]
    if blocks and not programs:
        raise NoProgramError(f"no block of {_DISPLAY_NAMES[language]} in the answer")
    program = programs[-1] if programs else answer
    if not program.strip():
        raise NoProgramError("no program in the answer")
    if len(program.encode(errors="replace")) > MAX_PROGRAM:
        raise NoProgramError(f"the program is longer than {MAX_PROGRAM} bytes")
    return program


def _blocks(answer: str) -> Iterator[tuple[str, str]]:
    """Yield language and body of each closed block. One pass: a pattern would be quadratic on unclosed fences."""
    language: str | None = None
    body: list[str] = []
    for line in answer.split("\n"):
        text = line.strip()
        if language is None and text.startswith(_FENCE) and _FENCE not in text[3:]:
            language, body = text[3:].strip().partition(" ")[0].lower(), []
        elif language is not None and text == _FENCE:
            yield language, "".join(f"{line}\n" for line in body)
            language = None
        elif language is not None:
            body.append(line)
