"""A raw HTTP/2 client that does nothing but ping, as a gateway does on its idle connections.

    python -m tests.worker.frontend.pinging 127.0.0.1:50051 --every 30 --for 300 [--watch]

says whether the server kept the connection. gRPC's own clients hide what is asked here: they slow their
pings down when they are told ``too_many_pings``, and open a new connection.
"""

import argparse
import asyncio
import sys
import time
from dataclasses import dataclass, field

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY = 0x0, 0x1, 0x3, 0x4, 0x6, 0x7
ACK = END_STREAM = 0x1
END_HEADERS = 0x4
WATCH_STREAM = 1


def frame(kind: int, flags: int = 0, stream: int = 0, payload: bytes = b"") -> bytes:
    """RFC 9113, 4.1."""
    return len(payload).to_bytes(3) + bytes([kind, flags]) + stream.to_bytes(4) + payload


def header(name: str, value: str) -> bytes:
    """A literal header that no table keeps, RFC 7541, 6.2.2."""
    return b"\0" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()


@dataclass(slots=True)
class Pinging:
    """One connection. ``goaway`` is the server's reason once it has said that it ends the connection."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    acks: int = 0
    goaway: str | None = None
    watch_messages: int = 0
    watch_ended: bool = False
    _reading: "asyncio.Task[None] | None" = field(default=None, repr=False)

    @classmethod
    async def connect(cls, host: str, port: int, *, watch: bool = False) -> "Pinging":
        """``watch`` holds a grpc.health.v1 Watch open on the connection."""
        self = cls(*await asyncio.open_connection(host, port))
        self.writer.write(PREFACE + frame(SETTINGS))
        if watch:
            lines = {":method": "POST", ":scheme": "http", ":path": "/grpc.health.v1.Health/Watch"}
            lines |= {":authority": f"{host}:{port}", "te": "trailers", "content-type": "application/grpc"}
            block = b"".join(header(name, value) for name, value in lines.items())
            self.writer.write(frame(HEADERS, END_HEADERS, WATCH_STREAM, block))
            self.writer.write(frame(DATA, END_STREAM, WATCH_STREAM, bytes(5)))
        self._reading = asyncio.create_task(self._read())
        return self

    @property
    def is_cut(self) -> bool:
        return self.goaway is not None

    async def ping(self) -> None:
        self.writer.write(frame(PING, payload=b"pinging!"))
        await self.writer.drain()

    async def ping_every(self, seconds: float, times: int) -> None:
        """Until it is cut at the latest."""
        for number in range(times):
            if number:
                await asyncio.sleep(seconds)
            if self.is_cut:
                return
            await self.ping()

    async def answered(self, times: int, timeout_s: float = 5.0) -> bool:
        """Whether so many pings have been answered, on a connection that is not about to end."""
        async with asyncio.timeout(timeout_s):
            while self.acks < times and not self.is_cut:
                await asyncio.sleep(0.02)
        return not self.is_cut

    async def close(self) -> None:
        assert self._reading is not None
        self.writer.close()
        await self._reading

    async def _read(self) -> None:
        try:
            while True:
                head = await self.reader.readexactly(9)
                payload = await self.reader.readexactly(int.from_bytes(head[:3]))
                self._take(head[3], head[4], payload)
        except (asyncio.IncompleteReadError, ConnectionError):
            self.goaway = self.goaway or "the connection was closed"

    def _take(self, kind: int, flags: int, payload: bytes) -> None:
        if kind == SETTINGS and not flags & ACK:
            self.writer.write(frame(SETTINGS, ACK))
        elif kind == PING and flags & ACK:
            self.acks += 1
        elif kind == PING:
            self.writer.write(frame(PING, ACK, payload=payload))
        elif kind == GOAWAY:
            self.goaway = payload[8:].decode(errors="replace") or f"code {payload[4:8].hex()}"
        elif kind == DATA:
            self.watch_messages += 1
        elif kind == RST_STREAM or (kind == HEADERS and flags & END_STREAM):
            self.watch_ended = True


async def show(host: str, port: int, every_s: float, for_s: float, watch: bool) -> int:
    connection = await Pinging.connect(host, port, watch=watch)
    started_s = time.monotonic()
    times = int(for_s / every_s) + 1
    await connection.ping_every(every_s, times)
    kept = await connection.answered(times)
    took_s = time.monotonic() - started_s
    if kept:
        print(f"kept: {connection.acks} pings answered in {took_s:.0f} s, one every {every_s:g} s")
    else:
        print(f"cut after {took_s:.0f} s, {connection.acks} pings answered: {connection.goaway}")
    if watch:
        print(f"the health Watch {'ended' if connection.watch_ended else 'is open'}")
    await connection.close()
    return 0 if kept else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("address", help="HOST:PORT of a gRPC server")
    parser.add_argument(
        "--every", type=float, default=30.0, help="seconds between pings (default 30, as SMG does)"
    )
    parser.add_argument("--for", dest="for_s", type=float, default=300.0, help="seconds in all (default 300)")
    parser.add_argument("--watch", action="store_true", help="hold a health Watch open meanwhile")
    given = parser.parse_args()
    host, _, port = given.address.rpartition(":")
    return asyncio.run(show(host, int(port), given.every, given.for_s, given.watch))


if __name__ == "__main__":
    sys.exit(main())
