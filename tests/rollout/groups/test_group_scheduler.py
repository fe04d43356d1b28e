"""The decisions of the group scheduler, case by case."""

import pytest
from groups_world import World

from prorl_gym.demand import Demand, RedundantHandling
from prorl_gym.errors import CancelReason, FailureKind
from prorl_gym.rollout.groups.group import MAX_POSITIONS, Replica, replacement_id
from prorl_gym.rollout.groups.group_scheduler import GroupScheduler
from prorl_gym.rollout.protocol import Stage

KILL = RedundantHandling(init="kill", run="kill")
FINISH = RedundantHandling(init="finish", run="finish")
REDUNDANT, STALE = CancelReason.REDUNDANT, CancelReason.STALE


def test_groups_are_judged_by_their_rewards() -> None:
    world = World(Demand(groups=10))
    world.complete("same", [1.0, 1.0, 1.0])
    world.complete("differ", [1.0, 0.0, 1.0])
    world.complete("nearly", [1.0, 1.0 + 1e-7])
    world.complete("single", [1.0])
    assert world.verdicts == {
        "same": "uninformative",
        "differ": "ready",
        "nearly": "uninformative",
        "single": "uninformative",
    }


def test_masked_rewards_count_unless_all_are_masked() -> None:
    world = World(Demand(groups=10))
    for group_id, masks in (("some", (True, False)), ("all", (True, True))):
        for name, reward, masked in zip(world.submit(group_id, 2), (0.0, 1.0), masks, strict=True):
            world.run(name)
            world.finish(name, reward, masked=masked)
    assert world.verdicts == {"some": "ready", "all": "uninformative"}


def test_a_group_is_decided_before_it_is_complete_and_judged_after() -> None:
    world = World(Demand(groups=10))
    a, b, c = world.submit("g", 3)
    world.run(a, b, c)
    world.finish(a, 0.0)
    assert world.book.status().states == {"open": 1}
    world.finish(b, 1.0)
    assert (world.book.status().states, world.verdicts) == ({"informative": 1}, {})
    world.finish(c, 1.0)
    assert world.verdicts == {"g": "ready"}


def test_once_enough_are_ready_the_rest_is_stopped_by_stage() -> None:
    world = World(Demand(groups=1, redundant=KILL))
    queued, prepared, working, graded = world.submit("g", 4)
    world.enter(prepared, "init")
    world.run(working, graded)
    world.enter(graded, "eval")
    world.complete("first", [0.0, 1.0])
    assert world.cancels() == {queued: REDUNDANT, prepared: REDUNDANT, working: REDUNDANT}
    world.sweep()
    world.finish(graded, 1.0)
    assert world.verdicts == {"first": "ready", "g": "redundant"}


def test_finish_lets_work_go_on_but_begins_nothing() -> None:
    world = World(Demand(groups=1, redundant=FINISH))
    queued, prepared, working = world.submit("g", 3)
    world.enter(prepared, "init")
    world.run(working)
    world.complete("first", [0.0, 1.0])
    assert world.cancels() == {queued: REDUNDANT}


@pytest.mark.parametrize(("redundant", "stage"), [(FINISH, "run"), (KILL, "eval")])
def test_a_group_from_which_nothing_is_cut_is_completed(redundant: RedundantHandling, stage: Stage) -> None:
    world = World(Demand(groups=1, redundant=redundant))
    ids = world.submit("g", 3)
    world.run(*ids)
    if stage == "eval":
        for name in ids:
            world.enter(name, stage)
    world.complete("first", [0.0, 1.0])
    for reward, name in enumerate(ids):
        world.finish(name, reward)
    assert (world.verdicts["g"], world.cancels()) == ("ready", {})


def test_agents_are_parked_and_their_group_is_kept_whole() -> None:
    world = World(Demand(groups=1))
    queued, prepared, working, graded = world.submit("g", 4)
    world.enter(prepared, "init")
    world.run(working, graded)
    world.enter(graded, "eval")
    world.complete("first", [0.0, 1.0])
    assert (world.parked(), world.held(), world.cancels()) == ({working}, {queued}, {})
    world.enter(prepared, "run")
    assert world.parked() == {working, prepared}


def test_parked_groups_come_back_oldest_first() -> None:
    world = World(Demand(groups=1))
    groups = [world.submit(name, 2) for name in ("b", "a", "c")]
    for ids in groups:
        world.run(ids[0])
    world.complete("first", [0.0, 1.0])
    assert world.parked() == {ids[0] for ids in groups}
    log = len(world.log)
    world.want(Demand(groups=1, after=len(world.members)))
    assert [name for decisions in world.log[log:] for name in decisions.unpark] == ["b.0", "a.0", "c.0"]
    assert (world.parked(), world.held()) == (set(), set())


def test_parked_ones_are_cancelled_after_their_time() -> None:
    world = World(Demand(groups=1, redundant=RedundantHandling(park_seconds=60)))
    ids = world.submit("g", 2)
    world.run(ids[0])
    world.complete("first", [0.0, 1.0])
    world.wait(59)
    assert world.cancels() == {}
    world.wait(1)
    world.sweep()
    assert world.verdicts["g"] == "redundant"


def test_what_comes_when_nothing_is_needed_waits_for_the_next_demand() -> None:
    world = World(Demand(groups=1, redundant=KILL))
    world.complete("first", [0.0, 1.0])
    ids = world.submit("late", 2)
    assert (world.held(), world.cancels()) == (set(ids), {})
    world.want(Demand(groups=1, after=len(world.members)))
    assert world.held() == set()


def test_what_waits_too_long_is_dropped() -> None:
    world = World(Demand(groups=0))
    ids = world.submit("late", 2)
    world.wait(600)
    assert world.cancels() == dict.fromkeys(ids, REDUNDANT)


def test_a_late_member_of_a_judged_group_is_not_needed() -> None:
    world = World(Demand(groups=5))
    world.complete("g", [0.0, 1.0])
    late = world.submit("g", 3, count=1, start=2)
    assert world.cancels() == {late[0]: REDUNDANT}
    world.sweep()
    assert (world.verdicts, world.doubled) == ({"g": "ready"}, [])


def test_a_failed_member_is_replaced_under_a_fixed_name() -> None:
    world = World(Demand(groups=5, replace=1))
    a, b = world.submit("g", 2)
    world.run(a, b)
    world.fail(a)
    assert world.made[f"{a}:r1"].stands_in_for == a
    world.finish(b, 1.0)
    world.run(f"{a}:r1")
    world.finish(f"{a}:r1", 0.0)
    assert world.verdicts == {"g": "ready"}


def test_replacements_are_bounded_by_group() -> None:
    world = World(Demand(groups=5, replace=2))
    a, b = world.submit("g", 2)
    world.fail(a)
    world.fail(b)
    world.fail(f"{a}:r1")
    assert f"{a}:r2" not in world.made
    world.finish(f"{b}:r1", 1.0)
    assert world.verdicts == {"g": "short"}


@pytest.mark.parametrize("kind", [FailureKind.BAD_ROW, FailureKind.SERVICE_RESTARTED, CancelReason.CLIENT])
def test_what_would_fail_again_or_is_not_wanted_is_not_replaced(kind: FailureKind | CancelReason) -> None:
    world = World(Demand(groups=5))
    a, b = world.submit("g", 2)
    if isinstance(kind, CancelReason):
        world.cancelled(a, kind)
    else:
        world.fail(a, kind)
    world.finish(b, 1.0)
    assert (set(world.made), world.verdicts) == ({a, b}, {"g": "short"})


def test_a_replacement_that_cannot_be_made_leaves_the_group_short() -> None:
    world = World(Demand(groups=5), make_replacements=False)
    a, b = world.submit("g", 2)
    world.fail(a)
    world.finish(b, 1.0)
    (replacement,) = [wish for decisions in world.log for wish in decisions.replacements]
    world.book.on_replacement_refused(replacement, world.now + 5)
    world.act()
    assert (world.verdicts, world.book.next_decision_at()) == ({}, world.now + 5)
    world.wait(5)
    assert [wish for decisions in world.log for wish in decisions.replacements] == [replacement, replacement]
    world.book.on_replacement_refused(replacement)
    world.act()
    assert world.verdicts == {"g": "short"}


def straggling(stage: Stage = "init") -> tuple[World, str]:
    """A world that knows that INIT takes 1 s and EVAL 2 s, and one rollout that is in a stage."""
    world = World(Demand(groups=50, extra=1, straggler_factor=3, straggler_seconds=2))
    for name in world.submit("usual", 6):
        world.enter(name, "init")
        world.wait(1)
        world.enter(name, "run")
        world.enter(name, "eval")
        world.wait(2)
        world.finish(name, 1.0)
    (slow,) = world.submit("g", 1)
    world.enter(slow, "init")
    if stage == "eval":
        world.enter(slow, "run")
        world.enter(slow, "eval")
    return world, slow


def test_an_extra_replica_races_a_straggler_and_who_runs_first_stays() -> None:
    world, slow = straggling()
    world.wait(2.9)
    assert f"{slow}:x1" not in world.made
    world.wait(0.1)
    world.run(f"{slow}:x1")
    assert world.cancels() == {slow: REDUNDANT}
    world.sweep()
    world.finish(f"{slow}:x1", 1.0)
    assert world.verdicts["g"] == "uninformative"


@pytest.mark.parametrize(
    ("stage", "first", "loser"),
    [("init", "run", ":x1"), ("eval", "extra runs", ""), ("eval", "finish", ":x1")],
    ids=["it runs first", "the extra samples first", "it is graded first"],
)
def test_who_comes_first_of_a_straggler_and_its_extra_stays(stage: Stage, first: str, loser: str) -> None:
    world, slow = straggling(stage)
    world.wait(3 if stage == "init" else 6)
    if first == "run":
        world.enter(slow, "run")
    elif first == "finish":
        world.finish(slow, 1.0)
    else:
        world.run(f"{slow}:x1")
    assert world.cancels() == {slow + loser: REDUNDANT}


def test_an_extra_takes_the_place_of_a_straggler_that_fails() -> None:
    world, slow = straggling("eval")
    world.wait(6)
    world.fail(slow, FailureKind.GRADER_FAILED)
    assert (world.cancels(), f"{slow}:r1" in world.made) == ({}, False)
    world.run(f"{slow}:x1")
    world.finish(f"{slow}:x1", 1.0)
    assert world.verdicts["g"] == "uninformative"


def test_who_lost_a_race_and_was_long_in_dying_does_not_speak_for_its_place() -> None:
    world, slow = straggling()
    world.wait(3)
    world.run(f"{slow}:x1")
    world.fail(f"{slow}:x1")  # while the sandbox of the other is still being taken down
    world.cancelled(slow)
    assert f"{slow}:r1" in world.made
    world.restart()
    world.run(f"{slow}:r1")
    world.finish(f"{slow}:r1", 1.0)
    assert world.verdicts["g"] == "uninformative"


def test_agents_are_never_raced() -> None:
    world, slow = straggling()
    world.enter(slow, "run")
    world.wait(10_000)
    assert f"{slow}:x1" not in world.made


def test_admission_counts_groups_and_lets_each_begin_as_a_whole() -> None:
    world = World(Demand(groups=2, max_staleness=0))
    for name in ("a", "b", "c"):
        world.submit(name, 2)
    assert world.held() == {"c.0", "c.1"}
    for name in ("a.0", "a.1"):
        world.run(name)
        world.finish(name, 1.0)
    assert (world.verdicts, world.held()) == ({"a": "uninformative"}, set())


def test_a_group_that_was_never_submitted_as_a_whole_keeps_no_other_from_beginning() -> None:
    world = World(Demand(groups=1, max_staleness=0))
    first, second = world.submit("short", 3, count=2)
    other = world.submit("other", 2)
    world.run(first, second)
    world.finish(first, 0.0)
    assert world.held() == set(other)
    world.finish(second, 1.0)
    assert world.held() == set()
    (last,) = world.submit("short", 3, start=2)  # the rest comes after all: it is no less needed than before
    third = world.submit("third", 2)
    assert world.held() == set(third)
    world.run(last)
    world.finish(last, 1.0)
    assert world.verdicts == {"short": "ready"}


def test_what_is_ready_takes_a_place_until_it_is_used() -> None:
    world = World(Demand(groups=1, max_staleness=1))
    world.complete("a", [0.0, 1.0])
    assert world.book.is_satisfied
    world.want(Demand(groups=2, max_staleness=0))
    world.submit("b", 2)
    world.submit("c", 2)
    assert world.held() == {"c.0", "c.1"}
    world.want(Demand(groups=2, max_staleness=0, after=2))
    assert world.held() == set()


def test_the_more_groups_teach_nothing_the_more_are_under_way() -> None:
    world = World(Demand(groups=2, max_staleness=0))
    for number in range(8):
        world.complete(f"dull{number}", [0.0, 0.0])
    names = [world.submit(f"g{number}", 2) for number in range(6)]
    assert world.held() == set(names[4]) | set(names[5])  # half of the groups in the estimate were informative: 4 for 2


def test_a_new_version_cancels_what_it_makes_hopeless() -> None:
    world = World(Demand(groups=5, max_staleness=1))
    began_early, waits = world.submit("old", 2)
    world.run(began_early)
    fresh = world.submit("fresh", 2)
    world.raise_version(1)
    world.run(*fresh)
    assert world.cancels() == {}
    world.raise_version(2)
    assert world.cancels() == {began_early: STALE, waits: STALE}
    world.sweep()
    assert world.verdicts == {"old": "stale"}


def test_what_was_ready_is_marked_when_it_becomes_too_old() -> None:
    world = World(Demand(groups=1, max_staleness=1, redundant=KILL))
    world.complete("a", [0.0, 1.0])
    assert not world.book.is_stale(world.members[0])
    world.raise_version(2)
    status = world.book.status()
    assert (status.ready, status.ready_stale, status.satisfied) == (0, 1, False)
    assert world.book.is_stale(world.members[0])
    assert [ready.stale for ready in status.ready_groups] == [True]


def test_an_attempt_that_is_made_again_samples_anew() -> None:
    world = World(Demand(groups=5, max_staleness=0))
    (name,) = world.submit("g", 1)
    world.run(name)
    world.enter(name, "queue")
    world.raise_version(1)
    assert world.cancels() == {}


def test_versions_are_never_lowered() -> None:
    world = World(Demand(groups=5, version=3))
    world.want(Demand(groups=5, version=1))
    world.raise_version(2)
    assert world.book.status().version == 3


def test_a_restart_knows_of_a_version_by_what_it_sampled() -> None:
    world = World(Demand(groups=5, max_staleness=1))
    world.raise_version(7)
    world.complete("g", [0.0, 1.0])
    world.version = 0
    world.restart()
    assert world.book.status().version == 7


def test_waste_and_gain_are_counted() -> None:
    world = World(Demand(groups=1, redundant=KILL))
    a, b = world.submit("g", 2)
    world.run(a)
    world.complete("first", [0.0, 1.0])
    assert set(world.cancels()) == {a, b}
    world.sweep()
    status = world.book.status()
    assert (status.wasted_tokens, status.reclaimed_seconds) == (10, 10.0)  # 5 tokens each; b had not begun its 10 s


def test_replacements_find_their_place_in_any_order() -> None:
    world = World(Demand(groups=5))
    a, b = world.submit("g", 2)
    world.run(a, b)
    for name in (a, f"{a}:r1"):
        world.fail(name)
    world.run(f"{a}:r2")
    world.finish(f"{a}:r2", 1.0)
    world.finish(b, 0.0)
    members = list(world.members)
    for order in ([3, 2, 1, 0], [2, 0, 3, 1], [1, 2, 0, 3]):
        world.members = [members[index] for index in order]
        world.restart()
        assert world.verdicts == {"g": "ready"}


def test_a_group_that_was_stopped_stays_stopped_after_a_restart() -> None:
    world = World(Demand(groups=1, redundant=KILL))
    failed, cut, forgotten = world.submit("g", 3)
    world.make_replacements = False
    world.fail(failed)
    world.make_replacements = True
    world.run(cut, forgotten)
    world.complete("first", [0.0, 1.0])
    world.cancelled(cut)
    world.made[forgotten].cancel = None  # the crash came before this was written down
    world.want(Demand(groups=9, redundant=KILL))
    world.restart()
    assert world.cancels() == {cut: REDUNDANT, forgotten: REDUNDANT}
    world.sweep()
    assert (world.verdicts["g"], len(world.made)) == ("redundant", 5)


def test_a_group_that_is_far_too_large_is_not_looked_after_as_a_whole() -> None:
    world = World(Demand(groups=1, redundant=KILL))
    world.submit("everything", MAX_POSITIONS + 1)
    world.complete("first", [0.0, 1.0])
    assert len(world.cancels()) == MAX_POSITIONS


def test_a_place_that_far_too_many_claim_is_not_looked_after_as_a_whole() -> None:
    world = World(Demand(groups=1, redundant=KILL))
    world.submit("g", 1)
    for number in range(3 * MAX_POSITIONS):
        world.book.on_accepted(Replica(f"claims.{number}", "run", "g", 1, "env", "g.0"))
    assert len(list(world.book.groups["g"].replicas())) == 2 * MAX_POSITIONS


def test_ids_of_replacements_are_short_enough_and_apart() -> None:
    long, other = "a" * 128, "a" * 127 + "b"
    ids = {replacement_id(root, kind, number) for root in (long, other) for kind in "rx" for number in (1, 16)}
    assert len(ids) == 8
    assert all(len(name) <= 128 for name in ids)
    assert replacement_id("abc", "r", 1) == "abc:r1"


def test_stand_ins_are_counted_for_good() -> None:
    """Also of groups that are settled, and by a book that only reads the records."""
    world = World(Demand(groups=9, replace=2))
    for name in ("g", "h"):
        ids = world.submit(name, 2)
        world.run(*ids)
        world.finish(ids[0], 1.0)
        world.fail(ids[1])
        world.run(f"{ids[1]}:r1")
        assert world.book.status().replaced == (1 if name == "g" else 2)
        world.finish(f"{ids[1]}:r1", 0.0)
    assert world.verdicts == {"g": "ready", "h": "ready"}
    assert (world.book.status().replaced, world.book.status().extras) == (2, 0)
    again = GroupScheduler("run", world.demand)
    for member in world.members:
        again.on_finished(member)
        again.settle_rewarded()
    assert (again.status().replaced, again.status().extras) == (2, 0)
