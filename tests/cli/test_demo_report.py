import pytest
from rich.console import Console
from rollout_samples import ROW, failed, rollout, segment

from prorl_gym.cli.demo.run import check_results, pass_at, results_table
from prorl_gym.records import Score
from prorl_gym.trainers.gym_result import to_gym_result


def rows(*rewards: float, task: int = 0) -> list[dict[str, object]]:
    return [
        to_gym_result(rollout(rollout_id=f"r{task}-{i}", score=Score(reward=reward)), ROW | {"_ng_task_index": task})
        for i, reward in enumerate(rewards)
    ]


def test_good_rows_pass():
    assert check_results(rows(1.0, 0.0), expected=2).passed


def test_missing_row_is_a_complaint():
    assert check_results(rows(1.0), expected=2).errors == ["1 rows came back, 2 were sent"]


def test_masked_row_fails_the_demo_without_a_complaint():
    verdict = check_results([*rows(1.0), to_gym_result(failed(), ROW | {"_ng_task_index": 1})], expected=2)
    assert (verdict.errors, verdict.masked, verdict.passed) == ([], 1, False)


def test_group_with_another_first_prompt_is_a_complaint():
    other = to_gym_result(rollout(segments=[segment(prompt=[9, 9, 9])]), ROW | {"_ng_task_index": 0})
    verdict = check_results([*rows(1.0), other], expected=2)
    assert "first prompt differs" in verdict.errors[0]


def test_pass_at_k_counts_tasks():
    results = [*rows(1.0, 0.0, task=0), *rows(0.0, 0.0, task=1)]
    assert pass_at(results, any_of=False) == pytest.approx(0.25)
    assert pass_at(results, any_of=True) == pytest.approx(0.5)


def test_masked_rows_are_no_measurement():
    results = [*rows(1.0, task=0), to_gym_result(failed(), ROW | {"_ng_task_index": 0})]
    assert pass_at(results, any_of=False) == 1.0


def test_table_has_a_line_per_environment():
    results = [*rows(1.0, 0.0), *[row | {"environment": "code"} for row in rows(1.0, task=1)]]
    console = Console(width=80, record=True, file=open("/dev/null", "w"))
    console.print(results_table(results))
    text = console.export_text()
    assert "math" in text
    assert "0.50" in text
    assert "pass@2" in text
    head = next(line for line in text.splitlines() if "environment" in line).split()
    assert head[-4:] == ["queue", "INIT", "RUN", "EVAL"]
    assert "\N{HORIZONTAL ELLIPSIS}" not in text  # it fits a terminal
