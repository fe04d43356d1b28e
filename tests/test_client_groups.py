"""Groups out of a stream: when they are complete, who stands in, what is forgotten, and where to go on."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sample_records import BAD, BROKEN, CUT, LOST, STOPPED, delivered, member, record

from prorl_gym.client import CompletedGroup
from prorl_gym.client.group_stream import GroupAssembler
from prorl_gym.errors import ConflictError
from prorl_gym.records import Outcome, Rollout


def play(*rollouts: Rollout, replace: int = 0, used: int = 0) -> list[CompletedGroup]:
    book = GroupAssembler(used)
    found = [book.add_record(one, replace) for one in delivered(*rollouts)]
    return [group for group in found if group is not None]


def ids(groups: list[CompletedGroup]) -> list[list[str]]:
    return [[one.rollout_id for one in group.rollouts] for group in groups]


def test_groups_come_when_complete_with_their_members_in_order() -> None:
    groups = play(member("a", 1, 2), member("b", 0, 2), member("b", 1, 2), member("a", 0, 2), record("alone"))
    assert ids(groups) == [["b0", "b1"], ["a0", "a1"], ["alone"]]
    assert [(group.group_id, group.cursor, group.resume_cursor) for group in groups] == [
        ("b", 3, 0),
        ("a", 4, 4),
        (None, 5, 5),
    ]


def test_the_same_group_name_in_two_runs_is_two_groups() -> None:
    assert ids(play(member("a", 0, 2), member("a", 1, 2, run_id="other"))) == []


def test_two_rollouts_of_one_number_are_reported() -> None:
    with pytest.raises(ConflictError, match="g0 and twin are both replica 0 of it") as caught:
        play(member("g", 0, 2), member("g", 0, 2, name="twin"))
    assert "'replica' of its own" in caught.value.fix
    again = member("g", 0, 2)
    assert play(again, again) == [], "the same record twice is none"


def stand_in(name: str, replaced: str, size: int, outcome: Outcome | None = None) -> Rollout:
    return member("a", 0, size, outcome, name=name, stands_in_for=replaced)


FAILED_TWICE = (member("a", 0, 1, BROKEN), stand_in("a0:r1", "a0", 1, BROKEN))
RACED = (member("a", 0, 2, CUT), member("a", 1, 2), stand_in("a0:x1", "a0", 2), stand_in("a0:x2", "a0", 2))
REPLACED = (member("a", 0, 2, BROKEN), member("a", 1, 2), stand_in("a0:r1", "a0", 2))
EXTRA = (REPLACED[0], member("a", 1, 2, CUT, name="a1:x1", stands_in_for="a1"), *REPLACED[1:])


@pytest.mark.parametrize(
    ("records", "replace", "members"),
    [
        pytest.param(REPLACED, 1, ["a0:r1", "a1"], id="a replacement takes the place of a member that failed"),
        pytest.param(REPLACED, 0, ["a0", "a1"], id="none is waited for"),
        pytest.param(FAILED_TWICE, 1, ["a0:r1"], id="the service replaces once"),
        pytest.param(FAILED_TWICE, 2, None, id="the service replaces twice"),
        pytest.param((*FAILED_TWICE, stand_in("a0:r2", "a0:r1", 1)), 2, ["a0:r2"], id="the second replacement"),
        pytest.param((member("a", 0, 1, LOST),), 2, ["a0"], id="what only the service lost is not replaced"),
        pytest.param((member("a", 0, 1, BAD),), 2, ["a0"], id="a bad row is not replaced"),
        pytest.param(RACED, 0, ["a0:x1", "a1"], id="of two that raced the first reward counts"),
        pytest.param(EXTRA, 1, ["a0:r1", "a1"], id="an extra replica uses up no replacement"),
    ],
)
def test_who_stands_in(records: tuple[Rollout, ...], replace: int, members: list[str] | None) -> None:
    assert ids(play(*records, replace=replace)) == ([members] if members else [])


@pytest.mark.parametrize("outcome", [CUT, STOPPED])
def test_a_group_that_was_given_up_is_forgotten(outcome: object) -> None:
    book = GroupAssembler()
    for one in delivered(member("a", 0, 2, outcome), member("a", 1, 2, outcome)):  # type: ignore[arg-type]
        assert book.add_record(one) is None
    assert book.resume_cursor == 2


def test_a_group_in_doubt_is_forgotten_when_many_came_after_it() -> None:
    pairs = ((member(f"g{n}-", 0, 2, CUT), member(f"g{n}-", 1, 2)) for n in range(65))
    book = GroupAssembler()
    for one in delivered(*(rollout for pair in pairs for rollout in pair)):
        assert book.add_record(one) is None
    assert book.resume_cursor == 2


def test_rewards_leave_out_who_is_masked() -> None:
    (group,) = play(member("a", 0, 3), member("a", 1, 3, BAD), member("a", 2, 3, reward=0.0))
    assert group.rewards == [1.0, 0.0]


@settings(deadline=None)
@given(st.permutations([(group, replica) for group in "abc" for replica in range(3)]), st.integers(0, 9))
def test_going_on_after_any_group_loses_none_and_repeats_none(order: list[tuple[str, int]], stop: int) -> None:
    stream = delivered(*(member(group, replica, 3) for group, replica in order))
    book = GroupAssembler()
    everything = [group for one in stream if (group := book.add_record(one)) is not None]
    seen = [group for group in everything if group.cursor <= stop]
    resume, used = (seen[-1].resume_cursor, seen[-1].cursor) if seen else (0, 0)
    again = GroupAssembler(used)
    rest = [group for one in stream[resume:] if (group := again.add_record(one)) is not None]
    assert ids([*seen, *rest]) == ids(everything)


def test_a_group_with_a_damaged_record_is_over_and_holds_nothing_back() -> None:
    book = GroupAssembler()
    records = delivered(member("a", 0, 2), member("a", 1, 2), member("b", 0, 1))
    records[1] = records[1].model_copy(update={"damaged": True})
    found = [book.add_record(one) for one in records]
    assert [group and group.group_id for group in found] == [None, None, "b"]
    assert book.resume_cursor == 3
