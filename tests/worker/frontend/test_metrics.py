"""The metric table is the only list of metrics: page, counters and /metrics follow from it."""

from pathlib import Path

import pytest

from encodepool_worker.frontend.counts import MAX_REFUSED_FIELDS, Counts, exposition, from_loop
from encodepool_worker.metrics import COUNTER, TABLE, metrics_page, parse_sample, sample_name

PAGE = Path(__file__).parents[3] / "docs" / "metrics.md"


def test_the_page_is_up_to_date():
    assert PAGE.read_text() == metrics_page(), "run python -m encodepool_worker.metrics > docs/metrics.md"


def test_names_follow_the_rules_of_prometheus():
    names = [metric.name for metric in TABLE]
    assert len(set(names)) == len(names)
    for metric in TABLE:
        assert metric.name.startswith("encodepool_")
        assert metric.name.endswith("_total") == (metric.kind == COUNTER)
        assert metric.help.endswith(".")


def test_counters_of_the_table_can_be_counted_and_nothing_else():
    counts = Counts()
    counts.add("encodepool_requests_total", outcome="accepted")
    counts.add("encodepool_requests_total", 2, outcome="accepted")
    assert counts.get("encodepool_requests_total", outcome="accepted") == 3
    with pytest.raises(KeyError):
        counts.add("encodepool_requests")
    with pytest.raises(ValueError, match="labels"):
        counts.add("encodepool_requests_total")
    with pytest.raises(ValueError, match="gauge"):
        counts.add("encodepool_ready")


def test_fields_that_a_request_can_name_do_not_make_labels_without_bound():
    counts = Counts()
    for number in range(3 * MAX_REFUSED_FIELDS):
        counts.add_refused(f"model_specific_tensors[{number}].dtype")
        counts.add_refused(f"field_{number}")
    fields = counts.samples["encodepool_requests_refused_total"]
    assert fields[("model_specific_tensors[].dtype",)] == 3 * MAX_REFUSED_FIELDS
    assert len(fields) == MAX_REFUSED_FIELDS + 1
    assert sum(fields.values()) == 6 * MAX_REFUSED_FIELDS


def test_a_sample_name_can_be_read_back():
    for metric in TABLE:
        labels = {label: f"{label} 1" for label in metric.labels}
        assert parse_sample(sample_name(metric.name, **labels)) == (metric.name, tuple(labels.values()))
    awkward = sample_name("encodepool_transfer_failures_total", reason='a"b\\c{d}\n')
    assert parse_sample(awkward) == ("encodepool_transfer_failures_total", ("a_b_c_d__",))


@pytest.mark.parametrize(
    "sample", ["", "encodepool_hits_total", 'encodepool_hits_total{x="1"}', "other", "a{b}"]
)
def test_a_sample_that_is_not_in_the_table_is_left_out(sample):
    assert from_loop({sample: 1.0}) == {}


def test_the_text_has_ours_and_the_loops_in_the_order_of_the_table():
    counts = Counts()
    counts.add("encodepool_requests_total", outcome="accepted")
    loop = from_loop(
        {sample_name("encodepool_hits_total", tier="device"): 4.0, "encodepool_batches_total": 2.0}
    )
    text = exposition(counts.samples, {"encodepool_ready": {(): 1.0}}, loop).decode()
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    assert lines == [
        'encodepool_requests_total{outcome="accepted"} 1.0',
        "encodepool_ready 1.0",
        "encodepool_batches_total 2.0",
        'encodepool_hits_total{tier="device"} 4.0',
    ]
    assert "# TYPE encodepool_batches_total counter" in text
