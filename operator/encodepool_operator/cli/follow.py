"""What ``encodepool endpoints follow`` does: lists are heard of, and one file is kept in step with them."""

import asyncio
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog

from encodepool_operator.api import names
from encodepool_operator.core.endpoints import WORKERS
from encodepool_operator.core.joining import Joiner
from encodepool_operator.kube.client import Client
from encodepool_operator.kube.follow import follow_object
from encodepool_operator.kube.kinds import CONFIG_MAP
from encodepool_operator.kube.login import log_in
from encodepool_operator.local.errors import LocalError
from encodepool_operator.local.statedir import StateDir, read_text, write_atomic

POLL_S = 0.25
"""How often files are read: withdrawn groups serve for 10 s more, so there is time."""

TURN_S = 2.0
"""How often the file is compared, and the health file touched, where nothing has happened."""

STALE_S = 30.0
"""A source that could not be read for so long makes the file unhealthy; it stays as it is."""

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Sources:
    """``pools`` are [NS/]NAME of the cluster, ``state_dirs`` pools of this machine, ``manifest`` the file
    with prefill and decode workers."""

    pools: Sequence[str]
    state_dirs: Sequence[Path]
    manifest: Path | None
    context: str | None = None


class Follower:
    """Writes ``out`` whenever it is not what the sources say; ``health`` is there while it is in step."""

    def __init__(
        self,
        joiner: Joiner,
        out: Path,
        health: Path | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._joiner = joiner
        self._out = out
        self._health = health
        self._clock = clock
        self._news = asyncio.Event()
        self._heard_s = dict.fromkeys([*joiner.pools, *([joiner.manifest] if joiner.manifest else [])], 0.0)
        self._troubles: dict[str, str] = {}
        self._said: tuple[str, ...] = ()
        self._written = False

    def heard(self, source: str, text: str | None) -> None:
        self._heard_s[source] = self._clock()
        self._troubles.pop(source, None)
        self._joiner.heard(source, text, self._clock())
        self._news.set()

    def trouble(self, source: str, why: str) -> None:
        """``source`` cannot be read now."""
        if source not in self._troubles:
            log.warning("cannot be read now", source=source, why=why)
        self._troubles[source] = why

    async def run(self) -> None:
        """Until cancelled. Raises LocalError where the file cannot be written the first time."""
        try:
            while True:
                self._news.clear()
                wake_at_s = self._turn()
                wait_s = TURN_S if wake_at_s is None else min(TURN_S, max(0.0, wake_at_s - self._clock()))
                try:
                    async with asyncio.timeout(wait_s):
                        await self._news.wait()
                except TimeoutError:
                    pass
        finally:
            if self._health is not None:
                self._health.unlink(missing_ok=True)

    def _turn(self) -> float | None:
        joint = self._joiner.joint(self._clock())
        problems = joint.problems
        if joint.merged is not None:
            try:
                self._write(joint.merged.text, len(joint.merged.workers))
            except OSError as error:
                if not self._written:
                    raise LocalError(f"cannot write {self._out}: {error.strerror}") from error
                problems = (*problems, f"cannot write {self._out}: {error.strerror}")
        late = [name for name, at_s in self._heard_s.items() if self._clock() - at_s > STALE_S]
        trouble = self._show_health(self._written and not problems and not late)
        notes = joint.merged.notes if joint.merged is not None else ()
        self._say((*problems, *notes, *trouble))
        return joint.wake_at_s

    def _write(self, text: str, workers: int) -> None:
        try:
            same = read_text(self._out) == text
        except UnicodeDecodeError:
            same = False
        if not same:
            write_atomic(self._out, text)
            log.info("list written", file=str(self._out), workers=workers)
        self._written = True

    def _say(self, lines: tuple[str, ...]) -> None:
        for line in lines:
            if line not in self._said:
                log.warning(line)
        self._said = lines

    def _show_health(self, good: bool) -> tuple[str, ...]:
        """What went wrong with it."""
        if self._health is None:
            return ()
        try:
            if good:
                self._health.touch()
            else:
                self._health.unlink(missing_ok=True)
        except OSError as error:
            return (f"cannot write {self._health}: {error.strerror}",)
        return ()


async def follow(sources: Sources, out: Path, health: Path | None) -> int:
    """Keep ``out`` in step until SIGTERM (exit code 0). Raises LocalError and KubeError."""
    stopping = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopping.set)
    client, pools = None, {}
    if sources.pools:
        login = await log_in(context=sources.context)
        client = Client(login.configuration)
        pools = {_full(pool, login.namespace): pool for pool in sources.pools}
    folders = {str(folder): StateDir.at(folder).endpoints / WORKERS for folder in sources.state_dirs}
    manifest = str(sources.manifest) if sources.manifest is not None else ""
    follower = Follower(Joiner([*pools, *folders], manifest), out, health)
    tasks = [asyncio.create_task(stopping.wait()), asyncio.create_task(follower.run())]
    files = {**folders, **({manifest: sources.manifest} if sources.manifest is not None else {})}
    tasks += [asyncio.create_task(_follow_file(follower, name, path)) for name, path in files.items()]
    if client is not None:
        tasks += [asyncio.create_task(_follow_pool(follower, client, name)) for name in pools]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if client is not None:
            await client.close()
    log.info("asked to stop")
    return 0


def _full(pool: str, namespace: str) -> str:
    return pool if "/" in pool else f"{namespace}/{pool}"


async def _follow_file(follower: Follower, name: str, path: Path) -> None:
    while True:
        try:
            text = read_text(path)
        except (OSError, UnicodeDecodeError) as error:
            follower.trouble(name, str(error))
        else:
            follower.heard(name, text)
        await asyncio.sleep(POLL_S)


async def _follow_pool(follower: Follower, client: Client, pool: str) -> None:
    namespace, _, name = pool.partition("/")

    def heard(found: Any) -> None:
        text = ((found or {}).get("data") or {}).get(WORKERS)
        follower.heard(pool, None if text is None else str(text))

    await follow_object(
        client,
        CONFIG_MAP,
        namespace,
        names.endpoints_config_map(name),
        heard,
        lambda why: follower.trouble(pool, why),
    )
