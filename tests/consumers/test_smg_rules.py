"""The gateway's rules as we know them, held against the real gateway; and lists for it to take."""

import json
import shlex

import pytest
from tests.consumers.published import MODEL, SCENARIOS, highlights, story
from tests.consumers.smg_rules import Refused, from_args, from_file
from tests.peers.smg.gateway import Gateway, file_discovery
from tests.peers.smg.standin import StandIn

from encodepool_operator.core.manifest import merge, read_list

pytestmark = pytest.mark.real

NAMES = [scenario.name for scenario in SCENARIOS]
REPEATED_S = 30.0


@pytest.fixture(scope="module")
def start_gateway(peers_installed, spawn, free_port, tiny_model, tmp_path_factory):
    """``start_gateway(*flags)``: a gateway, not yet ready."""
    folder = tmp_path_factory.mktemp("gateways")
    started = []

    def start(*flags):
        log = folder / f"smg.{len(started)}.log"
        started.append(Gateway(spawn, free_port, tiny_model, MODEL, log, flags))
        return started[-1]

    yield start
    for gateway in started:
        gateway.stop()


@pytest.fixture(scope="module")
def language(peers_installed, free_port):
    """Entries of a prefill and a decode worker that can be listed, not used."""
    prefill, decode = (f"127.0.0.1:{free_port()}" for _ in range(2))
    port = int(prefill.rpartition(":")[2])
    with StandIn([prefill, decode], MODEL):
        yield [
            {"id": "p", "url": f"grpc://{prefill}", "worker_type": "prefill", "bootstrap_port": port},
            {"id": "d", "url": f"grpc://{decode}", "worker_type": "decode"},
        ]


class FollowedFile:
    """A gateway and the file that it follows, which holds ``text`` at first."""

    def __init__(self, start_gateway, path, text):
        self._path = path
        path.write_text(text)
        self.gateway = start_gateway(*file_discovery(path))

    def write(self, text):
        draft = self._path.with_suffix(".new")
        draft.write_text(text)
        draft.replace(self._path)


@pytest.fixture(scope="module")
def followed(start_gateway, language, tmp_path_factory):
    path = tmp_path_factory.mktemp("followed") / "workers.json"
    file = FollowedFile(start_gateway, path, json.dumps({"version": 1, "workers": language}))
    file.gateway.wait_workers(set())
    return file


# --- what is refused

ENTRY = {"id": "e", "url": "grpc://127.0.0.1:9", "worker_type": "encode", "bootstrap_port": 18995}


def document(*entries, **top):
    return json.dumps({"version": 1, "workers": list(entries), **top})


def entry(**change):
    return {key: value for key, value in (ENTRY | change).items() if value is not ...}


REFUSED = {
    "not JSON": "{",
    "empty": "",
    "a list": "[]",
    "no version": '{"workers":[]}',
    "version 2": document(version=2),
    "version as text": document(version="1"),
    "no workers": '{"version":1}',
    "another key on top": document(generation=7),
    "another key of a worker": document(entry(labels={})),
    "empty id": document(entry(id="")),
    "no url": document(entry(url=...)),
    "empty url": document(entry(url="")),
    "no worker_type": document(entry(worker_type=...)),
    "worker_type encoder": document(entry(worker_type="encoder")),
    "worker_type ENCODE": document(entry(worker_type="ENCODE")),
    "port too large": document(entry(bootstrap_port=70000)),
    "port as text": document(entry(bootstrap_port="18995")),
    "port of decode": document(entry(worker_type="decode")),
    "one id twice": document(entry(), entry(url="grpc://127.0.0.1:10")),
    "one url twice": document(entry(), entry(id="f")),
    "one url twice, with and without scheme": document(entry(), entry(id="f", url="127.0.0.1:9/")),
}


@pytest.mark.parametrize("text", REFUSED.values(), ids=REFUSED)
def test_the_real_gateway_refuses_what_the_rules_refuse_and_says_why(text, followed, wait_for):
    rule = from_file(text)
    assert isinstance(rule, Refused)
    before = len(followed.gateway.log_lines("invalid discovery manifest"))
    followed.write(text)
    wait_for(
        lambda: len(followed.gateway.log_lines("invalid discovery manifest")) > before,
        20,
        "a refusal in the log",
    )
    assert rule.why in followed.gateway.log_lines("invalid discovery manifest")[-1]


# --- what is taken


@pytest.fixture(scope="module")
def everybody():
    """Stand-ins at every address of the lists below."""
    lists = [moment.ready() for name in NAMES for moment in highlights(name)]
    addresses = {url.removeprefix("grpc://") for ready in lists for url, _ in ready}
    with StandIn(sorted(addresses), MODEL):
        yield


def test_the_real_gateway_takes_every_published_file(followed, language, everybody):
    for moment in [moment for name in NAMES for moment in highlights(name)]:
        lists = [(str(moment), read_list(moment.documents["workers.json"]))]
        merged = merge(language, lists)
        assert not isinstance(from_file(merged.text), Refused)
        followed.write(merged.text)
        followed.gateway.wait_workers(set(moment.ready()), REPEATED_S)


def test_a_mounted_list_is_enough_beside_prefill_and_decode_by_flags(
    start_gateway, language, everybody, tmp_path
):
    """A pool's ConfigMap as kubelet mounts it: each version a folder, put in place by one link."""

    def mount(documents):
        version = tmp_path / f"..{len(list(tmp_path.iterdir()))}"
        version.mkdir()
        for name, text in documents.items():
            (version / name).write_text(text)
        (tmp_path / "..new").symlink_to(version.name)
        (tmp_path / "..new").replace(tmp_path / "..data")

    started, mixed, _ = highlights(NAMES[0])
    mount(started.documents)
    (tmp_path / "workers.json").symlink_to("..data/workers.json")
    prefill, decode = language
    others = ["--prefill", prefill["url"], str(prefill["bootstrap_port"]), "--decode", decode["url"]]
    gateway = start_gateway(*file_discovery(tmp_path / "workers.json"), *others)
    gateway.wait_workers(set(started.ready()))
    mount(mixed.documents)
    gateway.wait_workers(set(mixed.ready()), REPEATED_S)
    gateway.stop()


def test_the_real_gateway_takes_every_command_line(start_gateway, language, everybody):
    started = [story(name)[0] for name in NAMES]
    tokens = [token for moment in started for token in shlex.split(moment.documents["smg-args"])]
    prefill, decode = language
    others = ["--prefill", prefill["url"], str(prefill["bootstrap_port"]), "--decode", decode["url"]]
    gateway = start_gateway(*tokens, *others)
    expected = {endpoint for moment in started for endpoint in moment.ready()}
    assert len(expected) == 3 * len(started)
    gateway.wait_workers(expected)
    assert {(w.url, w.bootstrap_port) for w in from_args(tokens)} == expected
    gateway.stop()


def test_the_real_gateways_api_takes_every_body(start_gateway, language, everybody, tmp_path):
    text = json.dumps({"version": 1, "workers": language})
    file = FollowedFile(start_gateway, tmp_path / "workers.json", text)
    file.gateway.wait_workers(set())
    started = [story(name)[0] for name in NAMES]
    for moment in started:
        for body in json.loads(moment.documents["smg-workers.json"]):
            status, text = file.gateway.request("POST", "/workers", body)
            assert status == 202, text
    file.gateway.wait_workers({endpoint for moment in started for endpoint in moment.ready()})
    file.gateway.stop()
