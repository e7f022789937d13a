"""Joining lists of pools with a full manifest of the gateway: what is taken, what is refused."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from encodepool_operator.core.endpoints import Endpoint, documents, lines_of, manifest_problems
from encodepool_operator.core.manifest import ManifestProblems, endpoint, merge, read_list, read_manifest

PREFILL = {"id": "p0", "url": "grpc://10.0.0.6:50051", "worker_type": "prefill", "bootstrap_port": 19311}
DECODE = {"id": "d0", "url": "grpc://decode-0.example:50051", "worker_type": "decode"}


def manifest(*workers, version=1):
    return json.dumps({"version": version, "workers": list(workers)})


def encode(number=0, **more):
    return {
        "id": f"ns/pool/{number}-1",
        "url": f"grpc://10.1.0.{number}:20000",
        "worker_type": "encode",
        "bootstrap_port": 20001,
        "model_id": "tiny",
        **more,
    }


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "not JSON"),
        ("", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ('{"version":1,"version":1,"workers":[]}', "'version' stands there twice"),
        ("[]", "exactly the keys"),
        ('{"version":1}', "exactly the keys"),
        ('{"version":1,"workers":[],"generation":2}', "exactly the keys"),
        (manifest(version=2), "version must be 1"),
        (manifest(version="1"), "version must be 1"),
        (manifest(version=True), "version must be 1"),
        ('{"version":1,"workers":{}}', "workers must be a list"),
        (manifest(1), "workers[0]: must be an object"),
        (manifest(DECODE, PREFILL | {"labels": {}}), "workers[1]: unknown key labels"),
        (manifest(PREFILL | {"id": ""}), "id must be a text"),
        (manifest(PREFILL | {"id": "half \ud800"}), "id must be a text"),
        (manifest({"worker_type": "prefill"}), "url is required"),
        (manifest(PREFILL | {"url": ""}), "url must be a text"),
        (manifest(PREFILL | {"url": "http://10.0.0.6:1"}), "url must be grpc://HOST:PORT"),
        (manifest(PREFILL | {"url": "grpc://10.0.0.6"}), "url must be grpc://HOST:PORT"),
        (manifest(PREFILL | {"url": "grpc://10.0.0.6:1/path"}), "url must be grpc://HOST:PORT"),
        (manifest({"url": "grpc://10.0.0.6:1"}), "worker_type must be one of"),
        (manifest(PREFILL | {"worker_type": "regular"}), "worker_type must be one of"),
        (manifest(PREFILL | {"worker_type": "ENCODE"}), "worker_type must be one of"),
        (manifest(PREFILL | {"bootstrap_port": 70000}), "bootstrap_port must be 1 to 65535"),
        (manifest(PREFILL | {"bootstrap_port": "19311"}), "bootstrap_port must be 1 to 65535"),
        (manifest(PREFILL | {"bootstrap_port": True}), "bootstrap_port must be 1 to 65535"),
        (manifest(DECODE | {"bootstrap_port": 1}), "applies only to encode and prefill"),
        (manifest(encode(bootstrap_port=None)), "bootstrap_port is required"),
        (manifest(encode(model_id=None)), "model_id is required"),
        (manifest(PREFILL, PREFILL | {"url": "grpc://10.0.0.7:1"}), "id p0 is also that"),
        (manifest(PREFILL, PREFILL | {"id": "p1", "url": "GRPC://10.0.0.6:50051/"}), "is also that"),
        (manifest(PREFILL, PREFILL | {"id": "p1", "url": "10.0.0.6:50051"}), "is also that"),
    ],
)
def test_what_the_gateway_would_reject_or_misread_is_refused(text, says):
    with pytest.raises(ManifestProblems) as error:
        read_manifest(text)
    assert says in str(error.value)


def test_what_the_gateway_takes_is_taken_as_it_is():
    workers = [PREFILL | {"kv_connector": "mooncake", "kv_role": "kv_producer"}, DECODE | {"model_id": "m"}]
    assert read_manifest(manifest(*workers)) == workers
    assert read_manifest(manifest({"url": "10.0.0.1:5", "worker_type": "decode", "id": None})) == [
        {"url": "10.0.0.1:5", "worker_type": "decode"}
    ]


def test_a_list_of_a_pool_must_be_complete():
    assert read_list(manifest(encode(1), encode(2))) == [encode(1), encode(2)]
    for worker in (PREFILL, {**encode(1), "kv_role": "x"}, encode(1, url="grpc://name:1")):
        with pytest.raises(ManifestProblems):
            read_list(manifest(worker))


def test_one_address_has_one_spelling():
    same = ("grpc://h:1", "GRPC://H:1", "h:1", "grpc://h:1/")
    assert {endpoint(url) for url in same} == {"h:1"}
    assert endpoint("grpc://[::1]:80") == "::1:80"
    assert {endpoint(url) for url in ("", "h", "h:0", "h:99999", "grpc://h:x", "a b:1", "u@h:1")} == {""}


def test_prefill_and_decode_come_first_and_the_lists_say_who_encodes():
    merged = merge([encode(9), PREFILL, DECODE], [("a", [encode(1)]), ("b", [encode(2), encode(3)])])
    assert merged.workers == [PREFILL, DECODE, encode(1), encode(2), encode(3)]
    assert merged.notes == ("1 encode workers of the manifest are left out: the lists say who encodes",)
    assert merge([], []).text == '{"version":1,"workers":[]}\n'


def test_a_pool_whose_model_no_prefill_serves_is_noted():
    lists = [("a", [encode(1), encode(2, model_id="other")])]
    known = merge([PREFILL | {"model_id": "tiny"}], lists)
    assert known.notes == ("no prefill worker serves model 'other': the gateway will not use its encoders",)
    # A prefill worker that names no model tells the gateway itself which it serves.
    assert merge([PREFILL], lists).notes == ()


@pytest.mark.parametrize(
    ("second", "says"),
    [
        (encode(1), "b: id ns/pool/1-1 is also that of a worker of a"),
        (encode(1, id="other"), "b: address 10.1.0.1:20000 is also that of a worker of a"),
        (encode(5, id="p0"), "b: id p0 is also that of a worker of the manifest"),
        (encode(5, url=PREFILL["url"]), "b: address 10.0.0.6:50051 is also that of a worker of the manifest"),
    ],
)
def test_no_two_workers_share_an_id_or_an_address(second, says):
    with pytest.raises(ManifestProblems) as error:
        merge([PREFILL], [("a", [encode(1)]), ("b", [second])])
    assert says in error.value.problems


# Any lists that pools publish, with any manifest around them.


@st.composite
def deployments(draw):
    """(base workers, lists of published documents): ids and addresses may collide."""
    octet = st.integers(1, 6)
    entries = st.builds(
        lambda group, host, port, ready: Endpoint(
            id=f"ns/p/{group}-{host}",
            group=group,
            incarnation=host,
            host=f"10.0.0.{host}",
            grpc_port=port,
            bootstrap_port=port + 1,
            model="tiny",
            tensor_parallel_size=1,
            ready=ready,
            draining=False,
            reason="",
            node="",
            zone="",
        ),
        st.integers(0, 3),
        octet,
        st.sampled_from([10000, 10002]),
        st.booleans(),
    )
    published = []
    for _ in range(draw(st.integers(0, 3))):
        listed = draw(st.lists(entries, max_size=3, unique_by=(lambda e: e.id, lambda e: e.url)))
        published.append(documents("ns", "p", "tiny", [lines_of("p", e) for e in listed])["workers.json"])
    others = st.builds(
        lambda role, host, named: {
            **({"id": f"{role}-{host}"} if named else {}),
            "url": f"grpc://10.0.0.{host}:10000",
            "worker_type": role,
        },
        st.sampled_from(["prefill", "decode"]),
        octet,
        st.booleans(),
    )
    return draw(st.lists(others, max_size=3)), published


@given(deployments())
def test_a_merge_holds_every_worker_once_or_is_refused(deployment):
    base, published = deployment
    lists = [(f"list {i}", read_list(text)) for i, text in enumerate(published)]
    expected = [*base, *(worker for _, workers in lists for worker in workers)]
    ids = [worker.get("id", worker["url"]) for worker in expected]
    addresses = [worker["url"] for worker in expected]
    unique = len(set(ids)) == len(ids) and len(set(addresses)) == len(addresses)
    try:
        merged = merge(base, lists)
    except ManifestProblems:
        assert not unique
        return
    assert unique
    assert merged.workers == expected
    # It is itself a manifest, and the base of the next merge.
    assert read_manifest(merged.text) == expected
    again = merge(read_manifest(merged.text), lists)
    assert again.text == merged.text
    assert merge(base, lists) == merged
    if not base:
        assert manifest_problems(merged.text) == []


@given(st.text(max_size=80) | st.binary(max_size=80).map(lambda raw: raw.decode("latin-1")))
def test_whatever_stands_in_a_file_is_read_or_refused(text):
    for read in (read_list, read_manifest):
        try:
            workers = read(text)
        except ManifestProblems:
            continue
        assert read(manifest(*workers)) == workers


@given(st.data())
def test_a_list_that_lost_its_end_is_refused(data):
    whole = manifest(encode(1), encode(2))
    cut = data.draw(st.integers(0, len(whole) - 1))
    with pytest.raises(ManifestProblems):
        read_list(whole[:cut])
