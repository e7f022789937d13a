"""Settings: one table makes flags, variables, checks and the page; all problems come at once."""

from pathlib import Path

import pytest

from encodepool_worker.errors import ConfigError
from encodepool_worker.settings import BY_NAME, TABLE, Settings, notes, settings_page

ROOT = Path(__file__).resolve().parents[2]


def problems(flags, environ=None):
    with pytest.raises(ConfigError) as caught:
        Settings.from_mapping(flags, environ or {})
    return caught.value.problems


def test_a_flag_wins_over_its_variable_and_a_variable_over_the_default():
    environ = {"ENCODEPOOL_MODEL": "/from/env", "ENCODEPOOL_GRPC_PORT": "6001", "ENCODEPOOL_SEED": "5"}
    settings = Settings.from_mapping({"grpc_port": 7001, "seed": None}, environ)
    assert (settings.model, settings.grpc_port, settings.seed) == ("/from/env", 7001, 5)
    assert settings.bootstrap_port == BY_NAME["bootstrap_port"].default


def test_all_problems_are_reported_at_once_and_say_where_they_come_from():
    found = problems(
        {"modl": "x", "grpc_port": -1, "seed": "many", "transfer_timeout_seconds": 8.0},
        {"ENCODEPOOL_DEVICE": "tpu"},
    )
    text = "\n".join(found)
    for part in (
        "--modl is not a setting",
        "grpc_port must be at least 0, is -1 (from --grpc-port)",
        "--seed: 'many' is not a whole number",
        "device must be one of auto, cpu, cuda, is 'tpu' (from ENCODEPOOL_DEVICE)",
        "quarantine_seconds (10) must be at least twice transfer_timeout_seconds (8)",
        "model is missing: give --model DIR or set ENCODEPOOL_MODEL",
    ):
        assert part in text
    assert len(found) == 6


@pytest.mark.parametrize("name", [row.name for row in TABLE if row.minimum == 0 or row.minimum == 1])
def test_negative_sizes_are_refused(name):
    assert any(name in text for text in problems({"model": "/m", name: -5}))


@pytest.mark.parametrize("name", [row.name for row in TABLE if row.above == 0])
@pytest.mark.parametrize("value", [0, -1, "nan", "inf"])
def test_times_are_above_zero_and_finite(name, value):
    flag = BY_NAME[name].flag
    assert any(name in text or flag in text for text in problems({"model": "/m", name: value}))


def test_a_data_parallel_size_above_one_is_refused_with_the_way_out():
    [problem] = problems({"model": "/m", "data_parallel_size": 2})
    assert "raise replicas" in problem


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"dist_init_port": 0}, "dist_init_port is 0"),
        ({"ranks_per_pod": 3}, "ranks_per_pod (3) must divide tensor_parallel_size (4)"),
        ({"ranks_per_pod": 2, "pod_index": 2}, "pod_index is 2, but the group has 2 pods"),
        ({"pod_index": 1}, "pod_index is 1, but the group has 1 pods"),
        ({"rank": 4}, "rank must be below tensor_parallel_size (4), is 4"),
    ],
)
def test_the_places_of_ranks_must_make_sense(flags, says):
    group = {"model": "/m", "tensor_parallel_size": 4, "dist_init_port": 9}
    Settings.from_mapping(group)
    assert [text for text in problems(group | flags) if says in text]


def test_a_pod_runs_its_own_ranks():
    settings = Settings(tensor_parallel_size=4, ranks_per_pod=2, pod_index=1)
    assert list(settings.own_ranks) == [2, 3]
    assert list(Settings(tensor_parallel_size=4).own_ranks) == [0, 1, 2, 3]


@pytest.mark.parametrize("host", ["", "0.0.0.0", "::", "[::1]", "a/b", "10.0.0.1,fd00::1"])
def test_an_address_nobody_can_connect_to_is_refused(host):
    assert any("host" in text for text in problems({"model": "/m", "host": host}))


def test_two_ports_cannot_be_the_same_but_may_both_be_free_ones():
    assert problems({"model": "/m", "grpc_port": 9000, "bootstrap_port": 9000}) == (
        "grpc_port and bootstrap_port are both 9000: choose two ports",
    )
    Settings.from_mapping({"model": "/m", "grpc_port": 0, "metrics_port": 0})


def test_receivers_must_know_the_bootstrap_port():
    assert "bootstrap_port is 0" in problems({"model": "/m", "bootstrap_port": 0})[0]


def test_argv_carries_every_setting_to_the_children():
    changed = {row.name: row.default for row in TABLE}
    changed |= {"model": "/m o/del", "seed": 3, "park_seconds": 0.25, "state_dir": "--odd", "heartbeat_fd": 7}
    settings = Settings.from_mapping(changed)
    assert Settings.from_argv(settings.to_argv()) == settings
    assert Settings.from_argv([f"{row.flag}={getattr(settings, row.name)}" for row in TABLE]) == settings


@pytest.mark.parametrize("argv", [["model"], ["--model"], ["--no-such", "1"], ["--model", "m", "-x"]])
def test_argv_that_is_none_of_ours_is_refused(argv):
    with pytest.raises(ConfigError):
        Settings.from_argv(argv)


def test_the_constructor_checks_too():
    with pytest.raises(ConfigError):
        Settings(model="/m", max_items_per_batch=0)
    with pytest.raises(ConfigError):
        Settings(model="/m", seed="1")  # type: ignore[arg-type]


def test_names_of_the_reference_are_read_with_a_note():
    environ = {
        "TOKENSPEED_EPD_ENCODE_EMBED_CACHE_MB": "64",
        "TOKENSPEED_DISAGGREGATION_BOOTSTRAP_TIMEOUT": "7",
        "TOKENSPEED_EPD_ENCODE_RING_SLOTS": "8",
        "ENCODEPOOL_PARK_SECONDS": "9",
        "ENCODEPOOL_PARK_SECOND": "9",
    }
    settings = Settings.from_mapping({"model": "/m"}, environ)
    assert (settings.store_device_mib, settings.park_seconds) == (64, 9.0)
    assert notes({}, environ) == [
        "TOKENSPEED_EPD_ENCODE_EMBED_CACHE_MB is read as ENCODEPOOL_STORE_DEVICE_MIB",
        "TOKENSPEED_DISAGGREGATION_BOOTSTRAP_TIMEOUT is ignored: park_seconds is set as well",
        "TOKENSPEED_EPD_ENCODE_RING_SLOTS has no effect: there is no ring of slots; "
        "the store is sized by store_device_mib",
        "ENCODEPOOL_PARK_SECOND is not a setting and has no effect",
    ]


def test_the_served_name_defaults_to_the_last_part_of_the_model():
    assert Settings(model="/models/qwen/").served_name == "qwen"
    assert Settings(model="org/name").served_name == "name"
    assert Settings(model="/models/qwen", served_model_name="vl").served_name == "vl"


def test_the_page_of_settings_is_up_to_date():
    """Regenerate with: python -m encodepool_worker.settings > docs/settings.md"""
    assert (ROOT / "docs" / "settings.md").read_text() == settings_page()


def test_the_page_lists_every_setting_once():
    page = settings_page()
    for row in TABLE:
        assert page.count(f"| `{row.flag}` | `{row.variable}` |") == 1


def test_the_references_switch_for_graphs_is_read_as_it_is_written_there():
    for word, wanted in (("1", "true"), ("True", "true"), ("0", "false"), ("false", "false")):
        environ = {"TOKENSPEED_MM_ENABLE_ENCODER_CUDA_GRAPH": word}
        assert Settings.from_mapping({"model": "/m"}, environ).encoder_cuda_graphs == wanted
    assert "encoder_cuda_graphs must be one of false, true, is 'maybe'" in "".join(
        problems({"model": "/m"}, {"ENCODEPOOL_ENCODER_CUDA_GRAPHS": "maybe"})
    )
