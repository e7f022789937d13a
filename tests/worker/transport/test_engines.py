"""Both engines keep the same promises. Receivers run in processes of their own."""

import time

import pytest

from encodepool_worker.errors import (
    RegistrationFailed,
    TransportError,
    WriteRefused,
    WriteTimedOut,
)
from encodepool_worker.transport.base import MAX_SLICES_PER_BATCH

ENGINES = ["tcp", pytest.param("mooncake", marks=pytest.mark.real)]


@pytest.mark.parametrize("name", ENGINES)
class TestEngine:
    @pytest.fixture
    def engine(self, name, engine_of, region):
        engine = engine_of(name)
        engine.register(region.ptr, region.nbytes)
        return engine

    @pytest.fixture
    def receiver(self, name, receiver_of):
        return receiver_of(name)

    def test_a_write_lands_where_it_was_sent(self, engine, receiver, region):
        region.memory[100:200] = b"x" * 100
        engine.write(receiver.session, [(region.ptr + 100, receiver.ptr + 4096, 100)])

        read = receiver.ask("read", at=4095, nbytes=102)
        assert (read["first"], read["last"]) == (0, 0)
        read = receiver.ask("read", at=4096, nbytes=100)
        assert (read["first"], read["last"]) == (ord("x"), ord("x"))

    def test_more_slices_than_fit_one_batch_all_land(self, engine, receiver, region):
        region.fill(7)
        count = 3 * MAX_SLICES_PER_BATCH // 2
        engine.write(
            receiver.session, [(region.ptr + 64 * i, receiver.ptr + 128 * i, 64) for i in range(count)]
        )

        last = receiver.ask("read", at=128 * (count - 1), nbytes=128)
        assert (last["first"], last["last"]) == (7, 0)

    def test_an_empty_write_is_done_at_once(self, engine, receiver, region):
        engine.write(receiver.session, [])
        engine.write(receiver.session, [(region.ptr, receiver.ptr, 0)])

    def test_an_unregistered_source_is_refused_here(self, engine, receiver, region, make_region):
        """Mooncake over TCP would have sent it; over RDMA the same write fails."""
        stranger = make_region(4096)
        with pytest.raises(WriteRefused, match="not registered here"):
            engine.write(receiver.session, [(stranger.ptr, receiver.ptr, 10)])
        with pytest.raises(WriteRefused, match="not registered here"):
            engine.write(receiver.session, [(region.ptr + region.nbytes - 5, receiver.ptr, 10)])
        engine.unregister(region.ptr)
        with pytest.raises(WriteRefused, match="not registered here"):
            engine.write(receiver.session, [(region.ptr, receiver.ptr, 10)])

    def test_a_target_outside_the_peers_memory_is_refused(self, engine, receiver, region):
        region.fill(1)
        for target in (receiver.ptr + receiver.nbytes - 5, receiver.ptr - 5, 4096):
            with pytest.raises(WriteRefused):
                engine.write(receiver.session, [(region.ptr, target, 10)])

        assert receiver.first_and_last() == (0, 0)
        engine.write(receiver.session, [(region.ptr, receiver.ptr, 10)])  # the peer is still fine

    def test_a_target_the_peer_has_unregistered_is_refused(self, engine, receiver, region):
        region.fill(1)
        engine.write(receiver.session, [(region.ptr, receiver.ptr, 10)])
        receiver.ask("forget")
        with pytest.raises(WriteRefused):
            engine.write(receiver.session, [(region.ptr, receiver.ptr + 100, 10)])
        assert receiver.ask("read", at=100, nbytes=1)["first"] == 0

    @pytest.mark.parametrize("session", ["127.0.0.1:1", "nonsense", "127.0.0.1:x", ""])
    def test_an_unknown_peer_is_refused_at_once(self, engine, region, session):
        started_s = time.monotonic()
        with pytest.raises(WriteRefused):
            engine.write(session, [(region.ptr, 4096, 10)])
        assert not engine.probe(session)
        assert time.monotonic() - started_s < 2.0

    def test_a_killed_peer_is_noticed_at_once(self, engine, receiver, region):
        engine.write(receiver.session, [(region.ptr, receiver.ptr, 10)])
        receiver.kill()
        started_s = time.monotonic()
        with pytest.raises(WriteRefused):
            engine.write(receiver.session, [(region.ptr, receiver.ptr, 10)])
        assert not engine.probe(receiver.session)
        assert time.monotonic() - started_s < 2.0

    def test_a_healthy_peer_answers_a_probe(self, engine, receiver):
        assert engine.probe(receiver.session)

    def test_a_frozen_peer_times_out_and_bytes_sent_later_never_reach_it(
        self, name, engine_of, receiver, region
    ):
        """Reusing the source after the timeout must not change what the peer ends up with."""
        engine = engine_of(name, timeout_s=1.0)
        engine.register(region.ptr, region.nbytes)
        region.fill(1)
        engine.write(receiver.session, [(region.ptr, receiver.ptr, region.nbytes)])
        receiver.stop()
        region.fill(2)
        started_s = time.monotonic()
        with pytest.raises(TransportError) as failure:
            engine.write(receiver.session, [(region.ptr, receiver.ptr, region.nbytes)])
        assert 0.9 < time.monotonic() - started_s < 4.0
        if name == "mooncake":  # the tcp engine sends nothing before the peer has agreed
            assert isinstance(failure.value, WriteTimedOut)
            assert failure.value.released
        region.fill(3)
        receiver.go_on()
        for _ in range(20):
            assert set(receiver.first_and_last()) <= {1, 2}

    def test_memory_is_registered_once(self, engine, region):
        with pytest.raises(RegistrationFailed):
            engine.register(region.ptr, region.nbytes)
        with pytest.raises(RegistrationFailed):
            engine.register(region.ptr + 4096, 4096)
        engine.unregister(region.ptr)
        engine.unregister(region.ptr)
        engine.register(region.ptr, region.nbytes)

    def test_one_region_serves_two_engines(self, name, engine, engine_of, receiver, region):
        other = engine_of(name)
        other.register(region.ptr, region.nbytes)
        region.fill(9)
        other.write(receiver.session, [(region.ptr, receiver.ptr, 100)])
        other.close()
        engine.write(receiver.session, [(region.ptr, receiver.ptr + 100, 100)])
        read = receiver.ask("read", at=0, nbytes=200)
        assert (read["first"], read["last"]) == (9, 9)

    def test_a_closed_engine_refuses(self, engine, receiver, region):
        engine.close()
        engine.close()
        with pytest.raises(WriteRefused, match="closed"):
            engine.write(receiver.session, [(region.ptr, receiver.ptr, 10)])
        engine.unregister(region.ptr)
