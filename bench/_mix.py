"""The fixed mix of an agent's actions in a repository, and the repository. Committed before it was measured."""

SETUP = """
mkdir -p /tmp/mix/pkg && cd /tmp/mix && git init -q . && git config user.email a@b && git config user.name n
for n in $(seq 60); do printf 'def function_%s(x):\\n    return x + %s\\n' $n $n > pkg/module_$n.py; done
printf 'from pkg.module_7 import function_7\\n\\n\\ndef test_it():\\n    assert function_7(1) == 8\\n' > test_seven.py
touch pkg/__init__.py; git add . && git commit -qm start
"""

ACTIONS = (
    "cd /tmp/mix && ls -la pkg",
    "cd /tmp/mix && grep -rn 'return x' pkg",
    "cd /tmp/mix && sed -i 's/x + 7$/x + 6 + 1/' pkg/module_7.py",
    "cd /tmp/mix && git diff",
    "cd /tmp/mix && python3 -m unittest -q test_seven || python3 -c 'import test_seven; test_seven.test_it()'",
    "cd /tmp/mix && git checkout -q .",
)
"""ls, grep, sed, git diff, one test file (its own function: images bring no pytest), git checkout."""
