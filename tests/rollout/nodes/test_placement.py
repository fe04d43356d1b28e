"""Placement: groups stay together, idle nodes first, then images, then room."""

from typing import Any

from prorl_gym.records import RolloutRequest
from prorl_gym.rollout.nodes.node_runners import NodeView, choose_node


def request(group: str | None = None, **task: Any) -> RolloutRequest:
    return RolloutRequest(environment="scripted", group_id=group, task=task)


def node(name: str, free: int = 4, **fields: Any) -> NodeView:
    return NodeView(name, free, **fields)


def test_no_node_has_a_slot() -> None:
    assert choose_node([], request()) is None
    assert choose_node([node("a", free=0), node("b", free=0)], request()) is None


def test_a_group_stays_on_one_node_while_it_has_a_slot() -> None:
    home = node("b", free=1, queued=3, groups={"default/g"})
    assert choose_node([node("a", free=9), home], request("g")) == "b"
    assert choose_node([node("a", free=9), node("b", free=0, groups={"default/g"})], request("g")) == "a"


def test_an_idle_node_goes_before_one_with_the_image() -> None:
    nodes = [node("a", queued=1, images={"x"}), node("b", free=1), node("c", free=2, images={"x"})]
    assert choose_node(nodes, request(image="x")) == "c"
    assert choose_node(nodes[:2], request(image="x")) == "b"


def test_the_most_free_slots_win_and_names_break_ties() -> None:
    assert choose_node([node("a", 1), node("c", 5), node("b", 5)], request()) == "b"
