"""The benchmarks' frame keeps what it promises, and one benchmark runs at a toy size. No figure is judged."""

import json

import pytest
from benchmarks import __main__ as benchmarks
from benchmarks import frame, intake
from benchmarks.frame import Line, Pair, Repeat, Watch

CALM = (1.0, 1.0)
AT_MOST = Line(at_most=1.5)
KEYS = {"bench", "what", "unit", "ours", "against", "theirs", "ratio", "low", "high", "line", "verdict"}


def repeat(ours, copy, other=1.0):
    return Repeat(ours, 1.0, ((copy, other), (copy, other)))


@pytest.fixture
def measured(monkeypatch):
    """``measured(ours, controls, line)``: the row of figures that come one after another."""

    monkeypatch.setattr(frame, "PATIENCE_S", 0.0)

    def measure(ours, controls, line=AT_MOST, repeats=3, is_fixed=False):
        figures, samples = iter([0.0, *ours]), iter(controls)
        pair = Pair(
            "B0", "a thing", "s", lambda: next(figures), "another", lambda: 1.0, line, is_fixed=is_fixed
        )
        return frame.measure(pair, Watch(lambda: next(samples)), repeats)

    return measure


def test_the_ratio_is_the_median_of_the_repeats_and_the_first_round_does_not_count(measured):
    row = measured([3.0, 1.0, 1.2], [CALM] * 4)
    assert (row.ratio, row.low, row.high) == (1.2, 1.0, 3.0)
    assert (row.verdict, row.repeats, row.measured) == ("pass", 3, 3)
    assert measured([2.0] * 3, [CALM] * 4).verdict == "miss"
    assert measured([2.0] * 3, [CALM] * 4, Line()).verdict == "-"


def test_a_repeat_beside_which_the_control_moved_is_measured_again(measured):
    busy = (1.0, 1.4)
    row = measured([1.0, 9.0, 9.0, 1.0, 1.0], [CALM, CALM, busy, CALM, CALM, CALM])
    assert (row.verdict, row.ratio, row.high) == ("pass", 1.0, 1.0)
    assert (row.repeats, row.measured) == (3, 5)


def test_a_control_that_never_holds_still_voids_the_row(measured):
    row = measured([1.0] * 6, [(1.2**n, 1.0) for n in range(7)])
    assert row.verdict == "void"
    assert (row.repeats, row.measured) == (0, 6)


def test_a_slower_machine_is_no_matter_to_a_ratio_but_it_is_to_a_fixed_limit(measured):
    slowing = [(1.1**n, 1.0) for n in range(7)]
    assert measured([1.0] * 3, slowing).verdict == "pass"
    assert measured([1.0] * 6, slowing, is_fixed=True).verdict == "void"


def test_a_repeat_beside_a_busy_machine_does_not_count_however_still_the_control_holds(measured):
    busy = (1.0, 2.5)
    row = measured([1.0] * 6, [CALM, *[busy] * 4, CALM, CALM])
    assert row.verdict == "void"
    assert (row.repeats, row.measured) == (1, 6)


def test_the_largest_set_without_a_moved_control_is_kept():
    slow, fast = [repeat(1.0, 2.0)] * 2, [repeat(2.0, 1.0), repeat(3.0, 1.1), repeat(4.0, 1.14)]
    assert frame.comparable([*slow, *fast, repeat(5.0, 1.0, other=2.0)]) == fast


def test_a_benchmark_prints_its_table_and_writes_it(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(intake, "ROUND_BYTES", 1 << 20)
    monkeypatch.setattr(intake, "against_reference", lambda *_: iter(()))
    monkeypatch.setattr(frame, "PATIENCE_S", 0.0)
    out = tmp_path / "deep" / "bench.json"

    code = benchmarks.main(["--quick", "--only", "B4", "--repeats", "1", "--json", str(out)])

    document = json.loads(out.read_text())
    assert document["quick"] is True
    assert {"cores", "processor", "load_1_5_15", "packages"} <= document["machine"].keys()
    rows = document["rows"]
    assert [row["bench"] for row in rows] == ["B4 intake"] * 4
    assert all(row.keys() >= KEYS and row["ours"] > 0 and row["theirs"] > 0 for row in rows)
    verdicts = {row["verdict"] for row in rows}
    assert verdicts <= {"pass", "miss", "void", "-"}
    assert code == (1 if "miss" in verdicts else 3 if "void" in verdicts else 0)
    said = capsys.readouterr().out
    assert "messages of 16 MiB" in said
    assert "4 rows in" in said


def test_a_benchmark_that_does_not_exist_is_named(capsys):
    with pytest.raises(SystemExit):
        benchmarks.main(["--only", "B1,B99"])
    assert "there is no B99; there are B1, B2" in capsys.readouterr().err
