"""What the followed file holds, as its sources come, change, break and go."""

import json

import pytest

from encodepool_operator.core.joining import GONE_S, Joiner


def listed(*numbers):
    workers = [
        {
            "id": f"ns/p/{n}-1",
            "url": f"grpc://10.1.0.{n}:20000",
            "worker_type": "encode",
            "bootstrap_port": 20001,
            "model_id": "m",
        }
        for n in numbers
    ]
    return json.dumps({"version": 1, "workers": workers})


BASE = json.dumps({"version": 1, "workers": [{"id": "p", "url": "grpc://h:1", "worker_type": "prefill"}]})


def ids(joint):
    return [worker["id"].removeprefix("ns/p/") for worker in joint.merged.workers]


@pytest.fixture
def joiner():
    """Of pools "a" and "b" and a manifest, all of which have been read at 0."""
    made = Joiner(["a", "b"], "base")
    made.heard("b", listed(2), 0.0)
    made.heard("base", BASE, 0.0)
    made.heard("a", listed(1), 0.0)
    return made


def test_nothing_is_written_before_every_source_was_read():
    joiner = Joiner(["a", "b"], "base")
    assert joiner.joint(0.0).merged is None
    joiner.heard("a", listed(1), 0.0)
    joiner.heard("base", BASE, 0.0)
    assert joiner.joint(0.0).merged is None
    joiner.heard("b", None, 0.0)
    waiting = joiner.joint(1000.0)
    assert (waiting.merged, waiting.problems) == (None, ("b: is not there",))
    joiner.heard("b", "{", 1001.0)
    assert joiner.joint(1001.0).merged is None
    joiner.heard("b", listed(), 1002.0)
    whole = joiner.joint(1002.0)
    assert (ids(whole), whole.problems) == (["p", "1-1"], ())


def test_the_order_is_that_of_the_pools_and_not_of_the_news(joiner):
    assert ids(joiner.joint(0.0)) == ["p", "1-1", "2-1"]
    joiner.heard("a", listed(1, 3), 1.0)
    assert ids(joiner.joint(1.0)) == ["p", "1-1", "3-1", "2-1"]


def test_a_list_that_cannot_be_used_leaves_its_last_good_one_and_the_others_go_on(joiner):
    joiner.heard("a", listed(1)[:-1], 1.0)
    joiner.heard("b", listed(4), 1.0)
    broken = joiner.joint(1.0)
    assert ids(broken) == ["p", "1-1", "4-1"]
    assert broken.problems[0].startswith("a: not JSON")
    joiner.heard("a", listed(5), 2.0)
    assert (ids(joiner.joint(2.0)), joiner.joint(2.0).problems) == (["p", "5-1", "4-1"], ())


def test_a_list_that_is_back_at_once_was_never_away(joiner):
    joiner.heard("a", None, 10.0)
    joiner.heard("a", None, 12.0)
    away = joiner.joint(12.0)
    assert (ids(away), away.wake_at_s, away.problems) == (
        ["p", "1-1", "2-1"],
        10.0 + GONE_S,
        ("a: is not there",),
    )
    joiner.heard("a", listed(1), 13.0)
    assert (joiner.joint(20.0).problems, joiner.joint(20.0).wake_at_s) == ((), None)
    assert ids(joiner.joint(20.0)) == ["p", "1-1", "2-1"]


def test_a_list_that_stays_away_is_empty_until_it_comes_again(joiner):
    joiner.heard("a", None, 10.0)
    gone = joiner.joint(10.0 + GONE_S)
    assert (ids(gone), gone.wake_at_s) == (["p", "2-1"], None)
    joiner.heard("a", listed(1), 30.0)
    assert ids(joiner.joint(30.0)) == ["p", "1-1", "2-1"]


def test_a_manifest_that_is_taken_away_stays_in_force(joiner):
    joiner.heard("base", None, 10.0)
    gone = joiner.joint(1000.0)
    assert (ids(gone), gone.problems) == (["p", "1-1", "2-1"], ("base: is not there",))


def test_while_two_pools_claim_one_address_nothing_is_written(joiner):
    joiner.heard("b", listed(1), 1.0)
    clash = joiner.joint(1.0)
    assert clash.merged is None
    assert any("also that of a worker of a" in problem for problem in clash.problems)
    joiner.heard("a", listed(), 2.0)
    assert ids(joiner.joint(2.0)) == ["p", "1-1"]
