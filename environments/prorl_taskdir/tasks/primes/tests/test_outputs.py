"""Runs the program on small limits and a large one."""

import subprocess
import sys


def primes(limit):
    """Return what the program prints."""
    ran = subprocess.run(
        [sys.executable, "/app/primes.py", str(limit)], capture_output=True, text=True, timeout=15, check=True
    )
    return [int(line) for line in ran.stdout.split()]


def test_small():
    """By hand."""
    assert primes(1) == []
    assert primes(2) == [2]
    assert primes(30) == [2, 3, 5, 7, 11, 13, 17, 19, 23, 29]


def test_large():
    """Count, last and sum are known."""
    found = primes(2_000_000)
    assert (len(found), found[-1], sum(found)) == (148933, 1999993, 142913828922)


print("=" * 27, "short test summary info", "=" * 27)
for test in (test_small, test_large):
    try:
        test()
    except Exception as error:
        print(f"FAILED test_outputs.py::{test.__name__} - {type(error).__name__}")
    else:
        print(f"PASSED test_outputs.py::{test.__name__}")
