"""Runs inside the grading sandbox as ``python3 -s -c <this text>``: calls one function of the program.

The program shares this process and may do anything to it: patch modules, print, leave early. None of that helps it,
because the expected value is not here: a forged result must be the right one. Standard library only, for any
Python from 3.8 on, and little of it: this is imported for every test.
"""

from __future__ import annotations

import json
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

RESULT = 3
"""Descriptor for results; what the program prints is dropped."""


class ListNode:
    def __init__(self, val: Any = 0, next: Any = None) -> None:
        self.val = val
        self.next = next


class TreeNode:
    def __init__(self, val: Any = 0, left: Any = None, right: Any = None) -> None:
        self.val = val
        self.left = left
        self.right = right


def to_list(values: Any) -> Any:
    head = None
    for value in reversed(values):
        head = ListNode(value, head)
    return head


def from_list(node: Any) -> Any:
    """Make an array of a linked list; one with a cycle is an error."""
    values: list[Any] = []
    seen: set[int] = set()
    while node is not None:
        if id(node) in seen:
            raise ValueError("the linked list has a cycle")
        seen.add(id(node))
        values.append(node.val)
        node = node.next
    return values


def to_tree(values: Any) -> Any:
    """Make a binary tree of an array in level order, in which missing children are null."""
    nodes = (None if value is None else TreeNode(value) for value in values)
    root = next(nodes, None)
    level = [root] if root else []
    for parent in level:  # grows while we go
        parent.left, parent.right = next(nodes, None), next(nodes, None)
        level += [child for child in (parent.left, parent.right) if child]
    return root


def from_tree(root: Any) -> Any:
    """Make an array in level order of a binary tree, without the nulls at the end."""
    values: list[Any] = []
    level: list[Any] = [root]
    seen: set[int] = set()
    for node in level:  # grows while we go
        values.append(None if node is None else node.val)
        if node is not None:
            if id(node) in seen:
                raise ValueError("a node is in the tree twice")
            seen.add(id(node))
            level += [node.left, node.right]
    while values and values[-1] is None:
        values.pop()
    return values


def identity(value: Any) -> Any:
    return value


def as_number(value: Any) -> Any:
    """Return a number of another type, as ``Fraction(4, 2)``, as an int or float, which may not be equal to it."""
    return int(value.real) if int(value.real) == value else float(value.real)


SCALARS: Any = (int, float, complex, str, bytes)
COLLECTIONS: Any = {list: list, tuple: tuple, set: set, frozenset: set}


def to_literal(text: Any) -> Any:
    import ast  # few tests need it

    return ast.literal_eval(text)


def from_literal(value: Any) -> Any:
    return repr(plain(value))


def plain(value: Any) -> Any:
    """Return the value that is equal to this one and that a literal can express, as a dict for a Counter.

    Raises ``TypeError`` where there is none.
    """
    if value is None or type(value) is bool:
        return value
    if issubclass(type(value), dict):
        return {plain(key): plain(item) for key, item in value.items()}
    for kind in SCALARS:
        if issubclass(type(value), kind):
            return kind(value)
    for kind, literal in COLLECTIONS.items():
        if issubclass(type(value), kind):
            return literal(plain(item) for item in value)
    number = as_number(value)
    if number != value:
        raise TypeError("no literal is equal to the result")
    return number


ARGUMENT_DECODERS = {"value": identity, "linked list": to_list, "tree": to_tree, "literal": to_literal}
RESULT_ENCODERS = {"value": identity, "linked list": from_list, "tree": from_tree, "literal": from_literal}


def main() -> None:
    """Serve the one request on standard input. Arguments: the row's runner, imports that precede the program."""
    livecodebench, prelude = sys.argv.pop(1) == "livecodebench", sys.argv.pop(1)
    request: Any = json.loads(sys.stdin.buffer.read())
    os.set_inheritable(RESULT, False)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    dumps, write, leave, take = json.dumps, os.write, os._exit, RESULT_ENCODERS[request["result_as"]]
    args = list(request["args"])
    for index, shape in enumerate(request["args_as"][: len(args)]):
        args[index] = ARGUMENT_DECODERS[shape](args[index])
    # A module like any other: dataclasses, pickle and multiprocessing look it up by its name.
    module = sys.modules["solution"] = type(sys)("solution")
    scope = module.__dict__
    scope.update(__file__=request["program"], ListNode=ListNode, TreeNode=TreeNode)
    sys.path.append(os.path.dirname(request["program"]))
    exec(prelude, scope)
    with open(request["program"], "rb") as file:
        source = file.read()
    exec(compile(source, request["program"], "exec", dont_inherit=True), scope)
    owner, _, method = request["entry"].rpartition(".")
    if livecodebench:
        owner = "Solution" if b"class Solution" in source else ""
    function = getattr(scope[owner]() if owner else module, method)
    result = function(*args)
    if request["result"] != "return":
        result = args[int(request["result"].split()[1])]
    result = take(result)
    if livecodebench and issubclass(type(result), tuple):
        result = list(result)
    text = dumps(result, default=as_number if livecodebench else None)
    if livecodebench and json.loads(text) != result:
        raise TypeError("no JSON value is equal to the result: it holds a tuple, or a key that is no text")
    data = text.encode("ascii")
    while data:
        data = data[write(RESULT, data) :]
    leave(0)  # without waiting for threads and exit handlers of the program


main()
