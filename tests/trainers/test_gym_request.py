from typing import Any

import pytest
from rollout_samples import ROW

from prorl_gym.errors import FailureKind, TaskError
from prorl_gym.settings import RolloutSettings
from prorl_gym.trainers.gym_request import GroupResolver, RowDefaults, row_digest, to_rollout_request

NO_INDEX = {key: value for key, value in ROW.items() if key != "_ng_task_index"}


def read(row: dict[str, Any], groups: GroupResolver | None = None, **defaults: Any):
    return to_rollout_request(row, "r1", RowDefaults(**defaults), groups or GroupResolver("run"))


def test_trainer_sampling_is_taken_verbatim_and_the_row_block_wins():
    params = ROW["responses_create_params"] | {"temperature": 0.7, "top_p": 0.9, "max_output_tokens": 64}
    row = ROW | {"responses_create_params": params, "prorl": {"settings": {"top_p": 0.5}}}
    settings = read(row, settings=RolloutSettings(temperature=0.1, max_turns=3)).settings
    assert (settings.temperature, settings.top_p) == (0.7, 0.5)
    assert (settings.max_turn_tokens, settings.max_turns) == (64, 3)


def test_foreign_row_without_task_keeps_its_verifier_fields():
    row = {"responses_create_params": {"input": []}, "question": "q", "answer": "4", "_ng_task_index": 0}
    assert read(row, environment="math").task == {"question": "q", "answer": "4"}


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"environment": None}, "environment"),
        ({"task": "text"}, "task"),
        ({"prorl": {"group": "g"}}, "group"),
        ({"prorl": {"settings": {"temperature": 9}}}, "temperature"),
    ],
)
def test_bad_row_names_the_key(change: dict[str, Any], key: str):
    with pytest.raises(TaskError, match=key) as caught:
        read(ROW | change)
    assert caught.value.kind is FailureKind.BAD_ROW


def test_key_depends_on_every_field():
    assert row_digest(ROW) == row_digest(dict(reversed(ROW.items())))
    assert row_digest(ROW) != row_digest(ROW | {"_ng_rollout_index": 1})


def test_explicit_group_wins():
    row = ROW | {"prorl": {"group_id": "g7", "group_size": 8, "replica": 5}}
    request = read(row, GroupResolver("run", size=4))
    assert (request.group_id, request.group_size, request.replica) == ("g7", 8, 5)


def test_task_index_makes_the_group_when_the_size_is_known():
    groups = GroupResolver("run", size=2)
    requests = [read(ROW | {"_ng_rollout_index": i}, groups) for i in range(2)]
    assert len({r.group_id for r in requests}) == 1
    assert requests[0].group_id is not None
    assert [r.replica for r in requests] == [0, 1]


def test_row_becomes_a_request_without_a_group_when_the_size_is_unknown():
    request = read(ROW | {"_ng_rollout_index": 3})
    assert (request.environment, request.task) == ("math", ROW["task"])
    assert (request.group_id, request.replica, request.group_size) == (None, 3, 4)


def test_rows_without_task_index_fill_groups_by_content():
    groups = GroupResolver("run", size=2)
    ids = [read(NO_INDEX | {"_rowidx": i}, groups).group_id for i in (0, 1, 0, 1)]
    assert ids[0] == ids[1] != ids[2] == ids[3]


def test_the_same_row_index_twice_opens_another_group():
    groups = GroupResolver("run", size=4)
    first, second = (read(NO_INDEX | {"_rowidx": 0}, groups).group_id for _ in range(2))
    assert first != second


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_group_that_never_filled_is_not_joined_by_a_later_epoch():
    clock = Clock()
    groups = GroupResolver("run", size=4, clock=clock)
    stale = read(NO_INDEX | {"_rowidx": 3}, groups).group_id  # made again alone, after its group was full
    clock.now = 599.0
    assert read(NO_INDEX | {"_rowidx": 2}, groups).group_id == stale
    clock.now = 1199.5  # 600 s after its last row
    epoch = [read(NO_INDEX | {"_rowidx": i}, groups).group_id for i in range(4)]
    assert len(set(epoch)) == 1
    assert epoch[0] != stale


def test_a_group_that_never_filled_is_closed_when_many_rows_of_others_came_after_it():
    groups = GroupResolver("run", size=4, clock=Clock())
    stale = read(NO_INDEX | {"_rowidx": 3}, groups).group_id
    for number in range(4096):
        read(NO_INDEX | {"task": {"question": str(number)}, "_rowidx": 0}, groups)
    assert read(NO_INDEX | {"_rowidx": 0}, groups).group_id != stale
    assert len(groups.open_groups) <= 4097
