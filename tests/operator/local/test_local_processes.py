"""Processes are named without doubt, started so that none is lost, and ended for sure."""

import asyncio
import os
import signal
import subprocess
import sys
from dataclasses import replace

from encodepool_operator.local.processes import (
    Exit,
    GatedProcess,
    identify,
    is_running,
    kill_session,
    send,
    session_members,
)

ENV = dict(os.environ)


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_a_process_waits_at_its_gate_until_it_is_let_through(tmp_path, wait_for):
    mark = tmp_path / "mark"
    gated = GatedProcess(["touch", str(mark)], ENV, tmp_path / "log")

    assert is_running(gated.process)
    assert not mark.exists()

    popen = gated.open_gate()
    assert popen.wait() == 0
    assert mark.exists()


def test_a_process_at_its_gate_goes_when_its_controller_dies(tmp_path, wait_for):
    """A controller killed between starting a worker and writing it down left it running for ever."""
    mark, pid_file = tmp_path / "mark", tmp_path / "pid"
    code = (
        "import os, sys, time\n"
        "from pathlib import Path\n"
        "from encodepool_operator.local.processes import GatedProcess\n"
        f"gated = GatedProcess(['touch', {str(mark)!r}], dict(os.environ), Path({str(tmp_path / 'log')!r}))\n"
        f"Path({str(pid_file)!r}).write_text(str(gated.process.pid))\n"
        "print('started', flush=True)\n"
        "time.sleep(60)\n"
    )
    controller = subprocess.Popen(python(code), stdout=subprocess.PIPE)
    assert controller.stdout.readline() == b"started\n"
    child = identify(int(pid_file.read_text()))
    assert child is not None

    controller.kill()
    controller.wait()
    controller.stdout.close()

    wait_for(lambda: not is_running(child), what="the child's end")
    assert not mark.exists()


def test_the_gate_leaves_arguments_as_they_are(tmp_path):
    out = tmp_path / "out"
    odd = ["", "a b", "$HOME", "'\"", "*"]
    gated = GatedProcess(
        [*python(f"import sys; open({str(out)!r}, 'w').write(repr(sys.argv[1:]))"), *odd],
        ENV,
        tmp_path / "log",
    )
    assert gated.open_gate().wait() == 0
    assert out.read_text() == repr(odd)


def test_a_number_given_to_somebody_else_is_not_taken_for_ours():
    with subprocess.Popen(["sleep", "60"]) as sleeper:
        process = identify(sleeper.pid)
        other = replace(process, start_ticks=process.start_ticks - 1)
        earlier_boot = replace(process, boot="another")

        assert is_running(process)
        assert not send(other, signal.SIGKILL)
        assert not send(earlier_boot, signal.SIGKILL)
        kill_session(other)
        assert sleeper.poll() is None

        assert send(process, signal.SIGKILL)
    assert not is_running(process)


def test_what_is_left_of_a_session_is_killed_also_when_it_is_frozen(tmp_path, wait_for):
    pids = tmp_path / "pids"
    code = (
        "import os, subprocess, sys\n"
        # The kernel hangs up on a frozen process whose leader dies; this one does not mind.
        "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
        "children = [subprocess.Popen(['sleep', '60'], process_group=0) for _ in range(2)]\n"
        f"open({str(pids)!r}, 'w').write(' '.join(str(c.pid) for c in children) + '\\n')\n"
        "children[0].wait()\n"
    )
    leader = subprocess.Popen(python(code), start_new_session=True)
    name = identify(leader.pid)
    wait_for(lambda: pids.exists() and pids.read_text().endswith("\n"), what="two children")
    children = [identify(int(pid)) for pid in pids.read_text().split()]
    os.kill(children[1].pid, signal.SIGSTOP)

    leader.kill()
    leader.wait()

    assert {member.pid for member in session_members(name)} == {child.pid for child in children}
    assert kill_session(name)
    assert session_members(name) == []
    assert not any(is_running(child) for child in children)


def test_the_exit_of_a_child_is_told_with_its_code_before_it_is_reaped():
    async def story(argv: list[str], signum: int | None) -> int | None:
        popen = subprocess.Popen(argv, start_new_session=True)
        process_exit = Exit(identify(popen.pid), popen)
        if signum is not None:
            popen.send_signal(signum)
        code = await asyncio.wait_for(process_exit.seen(), 10)
        assert popen.returncode is None
        await process_exit.cleaned()
        assert popen.returncode is not None
        return code

    assert asyncio.run(story(["sleep", "60"], signal.SIGKILL)) == 137
    assert asyncio.run(story(python("import time; time.sleep(0.2); raise SystemExit(3)"), None)) == 3


def test_the_exit_of_somebody_elses_child_is_seen_without_a_code():
    async def story(popen: subprocess.Popen[bytes]) -> int | None:
        process_exit = Exit(identify(popen.pid), None)
        waiting = asyncio.create_task(process_exit.seen())
        await asyncio.sleep(0)
        assert not waiting.done()
        popen.kill()
        return await asyncio.wait_for(waiting, 10)

    with subprocess.Popen(["sleep", "60"]) as popen:
        assert asyncio.run(story(popen)) is None
