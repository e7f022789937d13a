"""Bodies of /route as TokenSpeed sends and expects them."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from encodepool_worker.errors import WireError
from encodepool_worker.wire import bootstrap
from encodepool_worker.wire.bootstrap import (
    ParallelSizes,
    RankAddress,
    RankRegistration,
    RouteQuery,
    decode_address,
    decode_query,
    decode_registration,
    decode_sizes,
    encode_address,
    encode_registration,
    encode_sizes,
)

REFERENCE_PUT = (
    b'{"role": "Prefill", "world_size": 4, "dp_size": 1, "rank_ip": "10.0.0.5",'
    b' "rank_port": 40001, "engine_rank": 3}'
)


def put(**changes):
    body = json.loads(REFERENCE_PUT) | changes
    return json.dumps({name: value for name, value in body.items() if value is not ...}).encode()


def test_a_registration_is_what_the_reference_puts():
    registration = RankRegistration(rank=3, host="10.0.0.5", port=40001, world_size=4)
    assert encode_registration(registration) == REFERENCE_PUT
    assert decode_registration(REFERENCE_PUT) == registration


def test_ours_carries_the_incarnation():
    registration = RankRegistration(rank=0, host="10.0.0.5", port=40001, incarnation=7)
    body = encode_registration(registration)
    assert json.loads(body)["incarnation"] == 7
    assert decode_registration(body) == registration


def test_ports_and_ranks_may_come_as_text():
    assert decode_registration(put(rank_port="40001", engine_rank="3")).port == 40001


def test_rank_and_group_follow_from_the_sizes():
    registration = decode_registration(put(world_size=8, dp_size=2, engine_rank=5))
    assert (registration.dp_group, registration.rank_in_group) == (1, 1)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"role": 5}, "role"),
        ({"role": ...}, "role"),
        ({"world_size": 0}, "world_size"),
        ({"world_size": True}, "world_size"),
        ({"world_size": 10**9}, "world_size"),
        ({"dp_size": 3}, "dp_size"),
        ({"dp_size": ...}, "dp_size"),
        ({"rank_ip": ""}, "rank_ip"),
        ({"rank_ip": "a b"}, "rank_ip"),
        ({"rank_ip": 5}, "rank_ip"),
        ({"rank_port": 0}, "rank_port"),
        ({"rank_port": 65536}, "rank_port"),
        ({"rank_port": "4e4"}, "rank_port"),
        ({"rank_port": 1.5}, "rank_port"),
        ({"engine_rank": 4}, "engine_rank"),
        ({"engine_rank": -1}, "engine_rank"),
        ({"incarnation": "x"}, "incarnation"),
    ],
)
def test_a_wrong_field_is_named(changes, field):
    with pytest.raises(WireError) as error:
        decode_registration(put(**changes))
    assert error.value.field == field


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b"\xff", b"[" * 100_000, b" " * 70_000])
def test_a_body_that_is_no_object_is_refused(body):
    with pytest.raises(WireError) as error:
        decode_registration(body)
    assert error.value.field == "body"


def test_sizes_are_three_fields_and_null_before_registration():
    empty = b'{"prefill_tp_size": null, "prefill_dp_size": null, "prefill_pp_size": 1}'
    assert encode_sizes(ParallelSizes()) == empty
    assert decode_sizes(empty) == ParallelSizes()
    full = b'{"prefill_tp_size": 4, "prefill_dp_size": 1, "prefill_pp_size": 1}'
    assert encode_sizes(ParallelSizes(4, 1)) == full
    assert decode_sizes(full) == ParallelSizes(4, 1, 1)
    assert decode_sizes(b'{"prefill_tp_size": 2, "prefill_dp_size": 1}') == ParallelSizes(2, 1, 1)


def test_an_address_is_two_fields():
    address = RankAddress("10.0.0.5", 40001)
    assert encode_address(address) == b'{"rank_ip": "10.0.0.5", "rank_port": 40001}'
    assert decode_address(encode_address(address)) == address


def test_queries():
    assert RouteQuery().target == "/route?engine_rank=-1&target_dp_group=-1"
    assert decode_query({"engine_rank": "-1", "target_dp_group": "-1"}).wants_sizes
    assert decode_query({"engine_rank": "3", "target_dp_group": "0"}) == RouteQuery(3, 0)
    for wrong in ({}, {"engine_rank": "1"}, {"engine_rank": "", "target_dp_group": "0"}):
        with pytest.raises(WireError):
            decode_query(wrong)


def test_one_sentinel_alone_is_refused():
    """The reference answers 500."""
    for rank, group in (("-1", "0"), ("0", "-1"), ("-2", "-2")):
        with pytest.raises(WireError):
            decode_query({"engine_rank": rank, "target_dp_group": group})


bodies = st.one_of(
    st.binary(max_size=200),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=20), inner, max_size=3),
    ).map(lambda value: json.dumps(value).encode()),
    st.fixed_dictionaries(
        {},
        optional={
            name: st.none() | st.integers() | st.text(max_size=12) | st.lists(st.integers(), max_size=2)
            for name in json.loads(REFERENCE_PUT) | {"incarnation": 0, "prefill_tp_size": 0}
        },
    ).map(lambda value: json.dumps(value).encode()),
)


@given(bodies)
def test_any_body_decodes_or_is_a_wire_error(body):
    for decode in (decode_registration, decode_sizes, decode_address):
        try:
            decode(body)
        except WireError:
            pass


@given(st.dictionaries(st.sampled_from(["engine_rank", "target_dp_group"]), st.text(max_size=12)))
def test_any_query_decodes_or_is_a_wire_error(parameters):
    try:
        bootstrap.decode_query(parameters)
    except WireError:
        pass
