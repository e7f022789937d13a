"""A /dev/shm without a free byte: what lies there is read, and what comes inline needs none of it."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import grpc
import pytest
from smg_grpc_proto.generated import common_pb2
from smg_grpc_proto.generated import tokenspeed_encoder_pb2_grpc as encoder_grpc

UNSHARE = ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "--mount", "--map-root-user"]
MOUNT = "mount -t tmpfs -o size=1m tmpfs /dev/shm"
PIXEL_BYTES = 16 * 1536 * 4


@pytest.fixture(scope="module")
def own_shared_memory():
    """``own_shared_memory(argv)``: the program with a /dev/shm of 1 MiB that is nobody else's."""
    probe = subprocess.run([*UNSHARE, "sh", "-c", MOUNT], capture_output=True, text=True, check=False)
    if probe.returncode != 0:
        pytest.skip(f"no mount namespace can be made here: {probe.stderr.strip()}")
    return lambda argv: [*UNSHARE, "sh", "-c", f'{MOUNT} && exec "$@"', "sh", *argv]


def fill(path: Path) -> int:
    """Bytes written until nothing more would go in."""
    written = 0
    with path.open("wb", buffering=0) as file:
        try:
            while True:
                written += file.write(bytes(4096))
        except OSError:
            return written


def test_pixels_are_taken_while_shared_memory_is_full(
    bare_model, encode_request, tmp_path, spawn, free_port, rank0_at, own_shared_memory
):
    port, metrics, bootstrap = free_port(), free_port(), free_port()
    flags = {"model": bare_model, "run-dir": tmp_path, "grpc-port": port}
    flags |= {"bootstrap-port": bootstrap, "metrics-port": metrics}
    argv = [sys.executable, "-m", "encodepool_worker.frontend"]
    argv += [str(part) for name, value in flags.items() for part in (f"--{name}", value)]
    process = spawn(own_shared_memory(argv), tmp_path / "log")

    async def story():
        async with rank0_at(tmp_path, bootstrap, metrics) as rank0:
            shm = Path(f"/proc/{process.pid}/root/dev/shm")
            pixels = os.urandom(PIXEL_BYTES)
            (shm / "smg-tokenspeed-1-1-1").write_bytes(pixels)
            assert fill(shm / "smg-tokenspeed-1-1-2") < 1 << 20
            async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
                encoder = encoder_grpc.TokenSpeedEncoderStub(channel)
                handle = encode_request(1)
                source = handle.mm_inputs.items[0].encoder_input
                source.shm.CopyFrom(common_pb2.ShmHandle(name="smg-tokenspeed-1-1-1", nbytes=PIXEL_BYTES))
                assert (await encoder.Encode(handle)).accepted
                assert (await encoder.Encode(encode_request(2, pixels=pixels))).accepted

                # What a gateway leaves whose write did not fit: shorter than it says.
                source.shm.name = "smg-tokenspeed-1-1-3"
                (shm / source.shm.name).touch()
                os.truncate(shm / source.shm.name, PIXEL_BYTES - 1)
                handle.items[0].bootstrap_room = 3
                with pytest.raises(grpc.aio.AioRpcError) as error:
                    await encoder.Encode(handle)
                assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            (_, first), (_, second) = rank0.received[:2]
            assert first[0] == second[0] == pixels

    asyncio.run(story())
