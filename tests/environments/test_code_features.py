"""The code grader's other ways of testing: in place, shapes, checkers, partial credit, C++, comparisons by row."""

import json
from pathlib import Path
from typing import Any

import pytest
from code_support import function, mark, stdio

from prorl_gym.environments.code import program_runs
from prorl_gym.environments.code.code_row import CodeRow
from prorl_gym.environments.code.environment import CodeEnvironment, grade
from prorl_gym.environments.protocol import Leases
from prorl_gym.errors import GraderError
from prorl_gym.settings import resolve_settings

needs_cpp = pytest.mark.cpp


IN_PLACE = function(([[3, 1, 2]], [1, 2, 3]), ([[]], []), result="argument 0")
LINKED = function(([[1, 2, 3]], [3, 2, 1]), ([[]], []), args_as=["linked list"], result_as="linked list")
TREE = function(([[1, 2, 3, None, 4]], [1, 3, 2, None, None, 4]), ([[]], []), args_as=["tree"], result_as="tree")
REVERSE = """
    def f(head: ListNode) -> ListNode:
        back = None
        while head:
            head.next, back, head = back, head, head.next
        return back
"""
INVERT = """
    def f(root: TreeNode) -> TreeNode:
        if root:
            root.left, root.right = f(root.right), f(root.left)
        return root
"""


@pytest.mark.parametrize(
    ("tests", "program", "passes"),
    [
        (IN_PLACE, "def f(x): x.sort()", True),
        (IN_PLACE, "def f(x): return sorted(x)", False),
        (IN_PLACE, "def f(x): x = sorted(x)", False),
        (LINKED, REVERSE, True),
        (LINKED, "def f(head): return head", False),
        (LINKED, "def f(head):\n    if head: head.next = head\n    return head", False),
        (LINKED, "def f(head): return [3, 2, 1]", False),
        (TREE, INVERT, True),
        (TREE, "def f(root): return root", False),
    ],
)
async def test_shapes(leases: Leases, tests: dict[str, Any], program: str, passes: bool):
    assert (await mark(tests, program, leases)).reward == float(passes)


SUM_CHECKER = """
def check(given, expected, output):
    parts = [int(word) for word in output.split()]
    return len(parts) == 2 and sum(parts) == int(given)
"""
PARTS = stdio(("7\n", "3 4\n"), ("0\n", "0 0\n"))


@pytest.mark.parametrize(
    ("program", "why"),
    [
        ("n = int(input()); print(n - 1, 1)", None),
        ("n = int(input()); print(n, 1)", "wrong output"),
        ("print('rubbish')", "wrong output"),
        ("print('x' * 10)\nraise SystemExit(3)", "runtime error"),
        ("import sys; sys.stdout.buffer.write(b'\\xff')", "wrong output"),
    ],
)
async def test_checker_decides(leases: Leases, program: str, why: str | None):
    score = await mark(PARTS, program, leases, checker=SUM_CHECKER)
    assert score.detail.get("why") == why
    assert score.reward == float(why is None)


async def test_checker_of_functions_gets_arguments_and_result(leases: Leases):
    checker = "def check(args, expected, result): return sorted(result) == args[0] and len(result) == len(expected)"
    tests = function(([[1, 2]], [1, 2]))
    assert (await mark(tests, "def f(x): return x[::-1]", leases, checker=checker)).reward == 1.0
    assert (await mark(tests, "def f(x): return x[:1]", leases, checker=checker)).detail["why"] == "wrong result"
    assert (await mark(tests, "def f(x): return 1", leases, checker=checker)).detail["why"] == "wrong result"


@pytest.mark.parametrize(
    "checker", ["def check(a, b, c): return 1 / 0", "def check(a, b, c): return 'yes'", "x =", "def chick(): pass"]
)
async def test_checker_that_fails_on_the_expected_output_is_no_verdict(leases: Leases, checker: str):
    with pytest.raises(GraderError, match="fails on an expected output"):
        await mark(PARTS, "print(3, 4)", leases, checker=checker)


async def test_checker_never_shares_a_sandbox_with_the_program(leases: Leases):
    program = "import os\nfor n in ('solution.py', 'x'):\n    open('/tmp/' + n, 'w').write('seen')\nprint('1')"
    checker = "import os\ndef check(a, b, c): return not os.path.exists('/tmp/x')"
    assert (await mark(stdio(("", "2")), program, leases, checker=checker)).reward == 1.0


async def test_partial_credit_is_the_share_of_tests(leases: Leases):
    tests = stdio(*((f"{n}", f"{n * n}") for n in (0, 1, 2, 3)))
    score = await mark(tests, "n = int(input())\nprint(n if n != 3 else 1 / 0)", leases, partial=True)
    assert score.reward == 0.5
    assert score.detail == {"why": "wrong output", "passed": 2, "tests": 4}
    assert (await mark(tests, "print(int(input()) ** 2)", leases, partial=True)).reward == 1.0
    assert (await mark(tests, "n = int(input())\nprint(n)", leases)).reward == 0.0


async def test_sets_have_the_same_order_in_every_run(leases: Leases):
    program = "print(*{chr(97 + n) * 3 for n in range(20)})"
    tests = stdio(*[("", " ")] * 6)
    row = CodeRow.model_validate({"question": "?", "tests": tests})
    launch = program_runs.python_launch(row, program, function=False)
    inputs = program_runs.test_inputs(row.tests)
    runs = program_runs.BatchRunner(leases, 60.0).run_tests(launch, inputs, stop_at_crash=False)
    outputs = {end.output async for ends in runs for end in ends}
    assert len(outputs) == 1


async def test_tests_go_on_in_another_sandbox_when_a_batch_pauses(leases: Leases, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(program_runs, "BATCH_SECONDS", 0.001)
    program = "import os\nprint(os.path.exists('/tmp/x'))\nopen('/tmp/x', 'w')"
    assert (await mark(stdio(*[("", "False")] * 3), program, leases)).reward == 1.0


CPP_DOUBLE = "#include <iostream>\nint main() { long long n; std::cin >> n; std::cout << 2 * n << std::endl; }\n"
CPP_TESTS = stdio(("4", "8"), ("-7", "-14"))


@needs_cpp
async def test_cpp_program_passes(leases: Leases):
    assert (await mark(CPP_TESTS, CPP_DOUBLE, leases, language="cpp")).reward == 1.0


@needs_cpp
@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "why"),
    [
        ("int main() { return 0 }", "compile error"),
        ("", "compile error"),
        ('#include "/dev/zero"\nint main() {}', "compile error"),
        ('#include <cstdio>\nint main() { puts("8"); }', "wrong output"),
        ("int main() { for (volatile int i = 0;; i = i + 1) ; }", "time limit"),
        ("#include <vector>\nint main() { std::vector<char> x(1ull << 40); }", "memory limit"),
        ("int main() { int *p = nullptr; return *(volatile int *)p; }", "runtime error"),
        ('#include <cstdio>\nint main() { puts("8"); return 1; }', "runtime error"),
        ("#include <unistd.h>\n#include <signal.h>\nint main() { kill(getppid(), 9); }", "stopped the test runner"),
    ],
)
async def test_bad_cpp_program_fails(leases: Leases, program: str, why: str):
    score = await mark(CPP_TESTS, program, leases, language="cpp")
    assert (score.reward, score.detail["why"]) == (0.0, why)


@needs_cpp
@pytest.mark.slow
async def test_cpp_may_recurse_deeply(leases: Leases):
    program = """
        #include <iostream>
        int down(int n) { volatile char room[64]; room[0] = n; return n ? 1 + down(n - 1) + 0 * room[0] : 0; }
        int main() { int n; std::cin >> n; std::cout << down(n); }
    """
    assert (await mark(stdio(("1000000", "1000000")), program, leases, language="cpp")).reward == 1.0


async def test_prompt_states_what_the_row_asks_for(leases: Leases):
    environment = CodeEnvironment()

    async def prompt(row: dict[str, Any]) -> str:
        task = environment.parse_row({"question": "Do it.", **row})
        episode = await environment.init(task, leases, resolve_settings(environment.settings))
        return "\n".join(str(message.content) for message in episode.messages)

    assert "its argument 0 is looked at after the call" in await prompt({"tests": IN_PLACE})
    cpp = await prompt({"tests": PARTS, "language": "cpp", "starter_code": "int main() {}"})
    assert "C++17" in cpp and "```cpp\nint main() {}\n```" in cpp
    assert "Python" not in cpp


def rows_of_the_readme() -> list[dict[str, Any]]:
    text = (Path(__file__).parents[2] / "environments/prorl_code/README.md").read_text(encoding="utf-8")
    block = text.partition("```json\n")[2].partition("```")[0]
    return [json.loads(line) for line in block.splitlines()]


@pytest.mark.parametrize("number", [0, 1, pytest.param(2, marks=[needs_cpp, pytest.mark.slow])])
async def test_rows_of_the_readme_are_solved_by_their_solutions(leases: Leases, number: int):
    row = CodeEnvironment().parse_row(rows_of_the_readme()[number])
    assert (await grade(row, row.solution, leases, 60.0)).reward == 1.0
    assert (await grade(row, "print(8", leases, 60.0)).reward == 0.0
