"""The durable record of a group: annotations there and back, and times that lie in the future."""

import json
from dataclasses import replace

import pytest

from encodepool_operator.api import labels
from encodepool_operator.core.record import (
    MESSAGE_LIMIT_BYTES,
    GroupRecord,
    LastFailure,
    PortBlock,
    RecordError,
    Seal,
    SealedPod,
    annotations_of,
    not_after,
    record_of,
    rfc3339,
    seconds,
    shortened,
)

AT = 1_800_000_000.123
BARE = GroupRecord(7, "abc", PortBlock(1, 2, 3, 4), AT)
FAILURE = LastFailure(AT, 7, "Error", "demo-0-0", "n1", "encode", 137, "out of memory", counted=True)
FULL = replace(
    BARE,
    seal=Seal((SealedPod("u0", 0), SealedPod("u1", 2)), AT),
    restarts=3,
    failure=FAILURE,
    withdrawn_at=AT,
    draining_since=AT,
    resumed="again",
)


@pytest.mark.parametrize("record", [BARE, FULL, replace(FULL, failure=replace(FAILURE, exit_code=None))])
def test_a_record_comes_back_from_its_annotations(record):
    annotations = annotations_of(record)
    assert all(isinstance(value, str) for value in annotations.values())
    assert record_of(annotations | {"somebody/else": "x"}) == record


def test_what_is_not_set_leaves_no_annotation():
    assert set(annotations_of(BARE)) == {
        labels.INCARNATION,
        labels.REVISION,
        labels.PORTS,
        labels.STARTED_AT,
        labels.RESTARTS,
    }


def test_an_unknown_exit_code_is_left_out_since_the_api_server_drops_nulls():
    text = annotations_of(replace(BARE, failure=replace(FAILURE, exit_code=None)))[labels.LAST_FAILURE]
    assert "exitCode" not in json.loads(text)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (labels.INCARNATION, "seven"),
        (labels.PORTS, "1,2,3"),
        (labels.STARTED_AT, "yesterday"),
        (labels.STARTED_AT, "2026-01-01T00:00:00"),
        (labels.SEAL, "{}"),
        (labels.SEAL, "[1]"),
        (labels.SEAL, '{"at":5,"pods":[]}'),
        (labels.LAST_FAILURE, "not json"),
        (labels.LAST_FAILURE, "3"),
        (labels.WITHDRAWN_AT, ""),
    ],
)
def test_an_edited_annotation_is_named(key, value):
    with pytest.raises(RecordError, match=key) as caught:
        record_of(annotations_of(FULL) | {key: value})
    assert caught.value.annotation == key


@pytest.mark.parametrize("key", [labels.INCARNATION, labels.REVISION, labels.PORTS, labels.RESTARTS])
def test_a_missing_annotation_is_named(key):
    annotations = annotations_of(FULL)
    del annotations[key]
    with pytest.raises(RecordError, match=f"{key} is missing"):
        record_of(annotations)


def test_times_are_rfc3339_in_utc_with_milliseconds():
    assert rfc3339(AT) == "2027-01-15T08:00:00.123Z"
    assert seconds("2027-01-15T08:00:00.123Z") == AT
    assert seconds("2027-01-15T10:00:00+02:00") == 1_800_000_000.0


def test_times_after_now_move_to_now_and_others_stay():
    earlier = AT - 100
    moved = not_after(FULL, earlier)
    assert moved == replace(
        FULL,
        started_at=earlier,
        seal=replace(FULL.seal, at=earlier),
        failure=replace(FAILURE, at=earlier),
        withdrawn_at=earlier,
        draining_since=earlier,
    )
    assert not_after(moved, AT) is moved
    assert not_after(BARE, earlier) == replace(BARE, started_at=earlier)
    mixed = replace(BARE, started_at=earlier, withdrawn_at=AT)
    assert not_after(mixed, earlier) == replace(mixed, withdrawn_at=earlier)


@pytest.mark.parametrize(
    ("message", "kept"),
    [
        ("  short \n", "short"),
        ("x" * 300, "…" + "x" * (MESSAGE_LIMIT_BYTES - 3)),
        ("ä" * 200, "…" + "ä" * ((MESSAGE_LIMIT_BYTES - 3) // 2)),
    ],
)
def test_a_message_keeps_its_end_within_the_limit(message, kept):
    assert shortened(message) == kept
    assert len(kept.encode()) <= MESSAGE_LIMIT_BYTES
