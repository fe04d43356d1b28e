"""Logs as the runners write them, shortened, and what they say."""

from collections.abc import Mapping
from dataclasses import dataclass

from prorl_gym.environments.swe.runner_reports import Status


@dataclass(frozen=True, slots=True)
class Log:
    runner: str
    text: str
    statuses: Mapping[str, Status]
    complaint: str = ""


LOGS = {
    "pytest 8": Log(
        "pytest",
        """\
============================= test session starts ==============================
collected 8 items

tests/test_a.py .FEsxX..                                                 [100%]

==================================== ERRORS ====================================
E       fixture 'nothing' not found
=========================== short test summary info ============================
PASSED tests/test_a.py::test_plain
PASSED tests/test_a.py::test_ids[a b-c]
PASSED tests/test_a.py::test_ids[x - y]
PASSED tests/test_a.py::TestX::test_in_class[[1, 2]-{}]
SKIPPED [1] tests/test_a.py:12: not here
XFAIL tests/test_a.py::test_x - known
XPASS tests/test_a.py::test_y
ERROR tests/test_a.py::test_error - fixture 'nothing' not found
FAILED tests/test_a.py::test_fails[a - b] - assert 1 == 2
FAILED tests/test_a.py::test_message - AssertionError: PASSED tests/test_a.py::test_plain - [x
= 2 failed, 4 passed, 1 skipped, 1 xfailed, 1 xpassed, 1 error in 0.05s =
""",
        {
            "tests/test_a.py::test_plain": "passed",
            "tests/test_a.py::test_ids[a b-c]": "passed",
            "tests/test_a.py::test_ids[x - y]": "passed",
            "tests/test_a.py::TestX::test_in_class[[1, 2]-{}]": "passed",
            "tests/test_a.py::test_x": "xfail",
            "tests/test_a.py::test_y": "passed",
            "tests/test_a.py::test_error": "error",
            "tests/test_a.py::test_fails[a - b]": "failed",
            "tests/test_a.py::test_message": "failed",
        },
    ),
    "pytest 3, verbose, coloured": Log(
        "pytest",
        "\x1b[1m=== test session starts ===\x1b[0m\r\n"
        "tests/test_a.py::test_one \x1b[32mPASSED\x1b[0m                    [ 50%]\r\n"
        "tests/test_a.py::test_two[a b] \x1b[31mFAILED\x1b[0m               [100%]\r\n"
        "=================== 1 failed, 1 passed in 0.12 seconds ===================\r\n",
        {"tests/test_a.py::test_one": "passed", "tests/test_a.py::test_two[a b]": "failed"},
    ),
    "pytest, forged lines beside the real ones": Log(
        "pytest",
        "PASSED a.py::test_one\nPASSED a.py::test_two\n=== short test summary info ===\n"
        "FAILED a.py::test_one - assert 0\n=== 1 failed in 0.01s ===\n",
        {"a.py::test_one": "failed", "a.py::test_two": "passed"},
        "1 tests are reported as passed, the runner counted 0",
    ),
    "pytest, cut short": Log(
        "pytest", "collected 2 items\nPASSED a.py::test\n", {"a.py::test": "passed"}, "the test run did not end"
    ),
    "unittest 3.12": Log(
        "unittest",
        """\
test_add (tests.test_m.T.test_add) ... ok
test_doc (tests.test_m.T.test_doc)
The first line of a docstring. ... ok
test_err (tests.test_m.T.test_err) ... ERROR
test_fail (tests.test_m.T.test_fail) ... FAIL
test_skip (tests.test_m.T.test_skip) ... skipped 'not now'
test_loud (tests.test_m.T.test_loud) ... some output
and more of it
ok
test_x (tests.test_m.T.test_x) ... expected failure
test_y (tests.test_m.T.test_y) ... unexpected success
test_sub (tests.test_m.T.test_sub) ...\x20
  test_sub (tests.test_m.T.test_sub) (i=2) ... FAIL

======================================================================
FAIL: test_sub (tests.test_m.T.test_sub) (i=2)
----------------------------------------------------------------------
Ran 9 tests in 0.002s

FAILED (failures=2, errors=1, skipped=1, expected failures=1, unexpected successes=1)
""",
        {
            "tests.test_m.T.test_add": "passed",
            "tests.test_m.T.test_doc": "passed",
            "tests.test_m.T.test_err": "error",
            "tests.test_m.T.test_fail": "failed",
            "tests.test_m.T.test_skip": "skipped",
            "tests.test_m.T.test_loud": "passed",
            "tests.test_m.T.test_x": "xfail",
            "tests.test_m.T.test_y": "failed",
            "tests.test_m.T.test_sub": "failed",
        },
    ),
    "unittest 3.8": Log(
        "unittest",
        "test_add (tests.test_m.T) ... ok\nsetUpClass (tests.test_m.U) ... ERROR\n\nRan 1 test in 0.001s\n\nFAILED\n",
        {"tests.test_m.T.test_add": "passed", "tests.test_m.U.setUpClass": "error"},
    ),
    "unittest, more results than tests": Log(
        "unittest",
        "test_a (m.T.test_a) ... ok\ntest_b (m.T.test_b) ... ok\nRan 1 test in 0.001s\n\nOK\n",
        {"m.T.test_a": "passed", "m.T.test_b": "passed"},
        "2 tests are reported, the runner counted 1",
    ),
    "django": Log(
        "django",
        """\
Testing against Django installed in '/testbed/django' with up to 4 processes
test_get (generic_views.tests.T) ... ok
test_post (generic_views.tests.T) ... FAIL
test_warn (generic_views.tests.T) ... Internal Server Error: /x/
ok
======================================================================
FAIL: test_post (generic_views.tests.T)
Ran 3 tests in 0.050s
""",
        {
            "test_get (generic_views.tests.T)": "passed",
            "test_post (generic_views.tests.T)": "failed",
            "test_warn (generic_views.tests.T)": "passed",
        },
    ),
    "tap": Log(
        "tap",
        """\
TAP version 13
1..6
ok 1 - adds
not ok 2 - subtracts
  ---
  message: no
  ...
# a comment
    ok 1 - a subtest
ok 3 - later # SKIP no network
not ok 4 - planned # TODO not yet
ok 5
ok 6 - with # a comment
""",
        {
            "adds": "passed",
            "subtracts": "failed",
            "later": "skipped",
            "planned": "xfail",
            "5": "passed",
            "with": "passed",
        },
    ),
    "tap, one too many": Log(
        "tap", "1..1\nok 1 - a\nok 2 - b\n", {"a": "passed", "b": "passed"}, "2 tests are reported, 1 were planned"
    ),
    "tap, plan at the end": Log("tap", "ok 1 - a\nok 2 - a\n1..2\n", {"a": "passed"}),
    "tap, given up": Log("tap", "1..1\nok 1 - a\nBail out! no disk\n", {"a": "passed"}, "the test run did not end"),
    "go": Log(
        "go",
        """\
=== RUN   TestSplit
=== RUN   TestSplit/empty
=== RUN   TestSplit/two_words
    split_test.go:12: wrong
--- FAIL: TestSplit (0.00s)
    --- PASS: TestSplit/empty (0.00s)
    --- FAIL: TestSplit/two_words (0.00s)
=== RUN   TestSkip
--- SKIP: TestSkip (0.00s)
FAIL
FAIL\texample.org/words\t0.003s
""",
        {
            "TestSplit": "failed",
            "TestSplit/empty": "passed",
            "TestSplit/two_words": "failed",
            "TestSkip": "skipped",
        },
    ),
    "go -json": Log(
        "go",
        '{"Action":"run","Package":"p","Test":"TestA"}\n{"Action":"pass","Package":"p","Test":"TestA","Elapsed":0}\n'
        '{"Action":"pass","Package":"p","Elapsed":0.1}\nnot json {\n{"Action":"output","Package":"p"}\n',
        {"TestA": "passed"},
    ),
    "go, forged": Log(
        "go",
        "=== RUN   TestA\n--- PASS: TestB (0.00s)\n--- FAIL: TestA (0.00s)\nFAIL\n",
        {"TestB": "passed", "TestA": "failed"},
        "1 tests are reported that never began",
    ),
    "jest": Log(
        "jest",
        """\
PASS src/sum.test.js
  sum
    ✓ adds (3 ms)
    of three
      ✓ adds (1.5 s)
      ✕ subtracts
    ○ skipped later
FAIL src/top.test.js
  ✓ adds

  ● sum \u203a of three \u203a subtracts

Tests:       1 failed, 1 skipped, 3 passed, 5 total
Time:        0.5 s
""",
        {
            "sum > adds": "passed",
            "sum > of three > adds": "passed",
            "sum > of three > subtracts": "failed",
            "sum > later": "skipped",
            "adds": "passed",
        },
    ),
    "jest, forged": Log(
        "jest",
        "PASS a.test.js\n  ✓ a\n  ✓ b\nTests:       1 passed, 1 total\n",
        {"a": "passed", "b": "passed"},
        "2 tests are reported as passed, the runner counted 1",
    ),
    "cargo": Log(
        "cargo",
        """\
running 4 tests
test parse::empty ... ok
test parse::deep ... FAILED
test slow ... ignored, takes an hour
test panics - should panic ... ok

test result: FAILED. 2 passed; 1 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.00s

   Doc-tests words
running 1 test
test src/lib.rs - split (line 12) ... ok
test result: ok. 1 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.10s
""",
        {
            "parse::empty": "passed",
            "parse::deep": "failed",
            "slow": "skipped",
            "panics": "passed",
            "src/lib.rs - split (line 12)": "passed",
        },
    ),
    "cargo, does not compile": Log("cargo", "error[E0308]: mismatched types\n", {}, "the test run did not end"),
}
