import time
from pathlib import Path

import pytest

from prorl_gym.inference.engines.prometheus_page import PrometheusPage, parse_count
from prorl_gym.inference.engines.vllm import VllmDialect, VllmOptions

VLLM = VllmDialect("http://h/v1", VllmOptions(model="m", vocab_size=100))
PAGE = Path(__file__).with_name("vllm.prom").read_text()


def test_vllms_page_is_summed_over_its_engines():
    load = VLLM.read_load(PAGE.encode())
    assert load is not None
    assert (load.running, load.waiting, load.preemptions) == (7, 2, 5)
    assert load.kv_usage == pytest.approx(0.6)
    assert load.kv_capacity == 16 * 150
    assert (load.prefix_queries, load.prefix_hits) == (1500, 1200)


def test_a_capacity_that_is_not_known_yet_is_none():
    page = 'vllm:num_requests_running 0\nvllm:cache_config_info{block_size="16",num_gpu_blocks="None"} 1\n'
    load = VLLM.read_load(page.encode())
    assert load is not None
    assert load.kv_capacity is None


@pytest.mark.parametrize("page", [b"", b"<html>", b"\xff\xfe", b"vllm:num_requests_running NaN\n", b"up 1\n"])
def test_another_page_is_no_load(page):
    assert VLLM.read_load(page) is None


BROKEN_LINES = [
    "f",
    "f ",
    "f x",
    "f inf",
    "f NaN",
    "f{ 1",
    'f{a="1" 1',
    "f 1 2 3",
    "f 1 x",
    'f{a="' + "x" * (1 << 17) + '"} 1',
]


@pytest.mark.parametrize("line", BROKEN_LINES)
def test_a_line_that_cannot_be_read_is_left_out(line):
    assert not PrometheusPage(line.encode(), ["f"]).samples["f"]


def test_labels_may_hold_anything():
    (sample,) = PrometheusPage(rb'f{a="x\"} 2,b=\"",c="}"} 1', ["f"]).samples["f"]
    assert sample.value == 1
    assert sample.labels == {"a": r"x\"} 2,b=\"", "c": "}"}


def test_figures_stay_figures():
    page = PrometheusPage(b"f -3\nf 5\ng 7\ng -1\nh 1e300\n", ["f", "g", "h", "none"])
    assert page.total("f") == 5
    assert page.mean_share("g") == 0.5
    assert page.total("h") == 2**53
    assert (page.total("none"), page.mean_share("none")) == (0, 0.0)


@pytest.mark.parametrize(("text", "read"), [("16", 16), ("0", None), ("None", None), ("1e3", None), ("9" * 16, None)])
def test_counts_in_labels(text, read):
    assert parse_count(text) == read


def test_a_label_without_an_end_costs_no_more_than_its_length():
    line = b"f{" + b"a" * 60_000 + b"} 1\n"
    began = time.process_time()
    assert PrometheusPage(line, ["f"]).total("f") == 1
    assert time.process_time() - began < 2


def test_a_page_of_nothing_but_samples_is_read_up_to_a_bound():
    assert len(PrometheusPage(b'f{a="1"} 1\n' * 100_000, ["f"]).samples["f"]) == 4096
