"""``encodepool encode``: what it writes, what it shows, and how it fails."""

import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from PIL import Image

from encodepool_worker.cli.encode import encode
from encodepool_worker.client.heatmap import Tile, colours, draw_heatmap, token_norms
from encodepool_worker.errors import ClientError
from encodepool_worker.types import Grid


@pytest.fixture
def run():
    def invoke(*arguments):
        return CliRunner().invoke(encode, [str(argument) for argument in arguments])

    return invoke


def test_rows_heatmap_and_table(run, side, endpoints_file, pictures, tmp_path):
    paths = pictures((64, 96), (256, 64))
    out, heatmap = tmp_path / "rows.npz", tmp_path / "map.png"

    done = run(*paths, "--endpoints", endpoints_file(side.entry("7")), "--out", out, "--heatmap", heatmap)

    assert done.exit_code == 0, done.output
    with np.load(out) as arrays:
        assert {name: arrays[name].shape for name in arrays} == {
            "image0.main": (6, 8),
            "image0.deepstack": (6, 16),
            "image1.main": (16, 8),
            "image1.deepstack": (16, 16),
        }
        sent = {len(r.mm_inputs.items[0].encoder_input.inline): r for r in side.requests}
        pixels = sent[24 * 1536 * 4].mm_inputs.items[0].encoder_input.inline
        assert np.array_equal(arrays["image0.main"], side.rows_of(pixels, 6)[:, :8])
    with Image.open(heatmap) as sheet:
        assert sheet.format == "PNG"
        assert sheet.width > sheet.height > 300
    lines = done.stdout.splitlines()
    assert lines[0].split() == ["image", "group", "tokens", "ms", "bytes"]
    assert lines[1].split()[:3] == [str(paths[0]), "7", "6"]
    assert lines[1].split()[4] == str(6 * 24 * 4)
    assert lines[3:] == [f"wrote {out}", f"wrote {heatmap}"]


def test_one_failed_image_is_told_after_the_others(run, side, endpoints_file, pictures, tmp_path):
    paths = pictures((64, 64))
    (tmp_path / "text.png").write_text("no image")
    out = tmp_path / "rows.npz"

    done = run(*paths, tmp_path / "text.png", "--endpoints", endpoints_file(side.entry()), "--out", out)

    assert done.exit_code == 1
    assert "failed" in done.stdout
    assert done.stderr.strip() == (
        f"error: 1 of 2 images failed: {tmp_path}/text.png is not an image that Pillow can read"
    )
    with np.load(out) as arrays:
        assert sorted(arrays) == ["image0.deepstack", "image0.main"]


def test_a_failure_is_one_line_and_debug_adds_the_traceback(run, pictures, tmp_path):
    [path] = pictures((64, 64))
    absent = tmp_path / "absent.json"

    short, long = run(path, "--endpoints", absent), run(path, "--endpoints", absent, "--debug")

    line = f"error: {absent} does not exist: is the pool up, and is this its endpoints.json?"
    assert (short.exit_code, short.stdout, short.stderr.strip()) == (1, "", line)
    assert long.exit_code == 1
    assert "Traceback" in long.stderr
    assert long.stderr.strip().endswith(line)


def test_wrong_usage_ends_with_2(run, pictures, side, tmp_path):
    [path] = pictures((64, 64))
    for arguments in [
        [path],
        [path, "--endpoints", "a", "--endpoint", "b", "--bootstrap", "c:1"],
        [path, "--endpoint", side.url],
        [path, "--endpoints", "a", "--timeout", "0"],
        [path, "--endpoints", "a", "--out", tmp_path / "absent" / "rows.npz"],
        ["--endpoints", "a"],
        [path, "--endpoints", "a", "--transfer-backend", "carrier-pigeon"],
    ]:
        assert run(*arguments).exit_code == 2, arguments


def test_what_would_be_written_or_asked_wrongly_is_refused_before_anything_is_sent(
    run, side, endpoints_file, pictures, tmp_path
):
    [path] = pictures((64, 64))
    listed = ["--endpoints", endpoints_file(side.entry())]
    for arguments, says in [
        ([*listed, "--heatmap", tmp_path / "x.txt"], "--heatmap writes a .png file: call it x.png"),
        ([*listed, "--heatmap", tmp_path / "x.jpg"], "--heatmap writes a .png file: call it x.png"),
        ([*listed, "--heatmap", path], "--heatmap names one of the pictures: choose another name"),
        ([*listed, "--out", tmp_path / "rows.txt"], "--out writes a .npz file: call it rows.npz"),
        (["--endpoint", side.url, "--bootstrap", "bar"], "--bootstrap must be HOST:PORT, is 'bar'"),
        (["--endpoint", "bar", "--bootstrap", "c:1"], "--endpoint must be grpc://HOST:PORT, is 'bar'"),
        (
            [*listed, "--endpoint", side.url, "--bootstrap", "c:1"],
            "--endpoints and --endpoint both say where to send: leave one out",
        ),
    ]:
        done = run(path, *arguments)
        assert done.exit_code == 2, arguments
        assert says in done.stderr
    assert side.requests == []
    # As one name or another for what is written.
    for name in ("ROWS.NPZ", "rows"):
        assert run(path, *listed, "--out", tmp_path / name).exit_code == 0
        with np.load(tmp_path / name) as arrays:
            assert sorted(arrays) == ["image0.deepstack", "image0.main"]


def test_two_images_of_one_name_are_refused_before_anything_is_sent(run, side, pictures, tmp_path):
    [path] = pictures((64, 64))
    (tmp_path / "other").mkdir()
    twin = tmp_path / "other" / path.name
    twin.write_bytes(path.read_bytes())

    done = run(path, twin, "--endpoint", side.url, "--bootstrap", f"127.0.0.1:{side.bootstrap[1]}")

    assert done.exit_code == 1
    assert "two images are called 'image0'" in done.stderr
    assert side.requests == []


def test_a_stopped_command_ends_with_130_at_once(side, pictures, monkeypatch, run):
    """Images under way must not hold the command back for their timeout."""
    [path] = pictures((64, 64))
    side.on_ship = lambda *_: None

    def interrupt(*_, **__):
        deadline = time.monotonic() + 10
        while not side.requests and time.monotonic() < deadline:
            time.sleep(0.005)
        raise KeyboardInterrupt

    monkeypatch.setattr("encodepool_worker.client.encode.wait", interrupt)
    began = time.monotonic()

    done = run(path, "--endpoint", side.url, "--bootstrap", f"127.0.0.1:{side.bootstrap[1]}")

    assert (done.exit_code, done.stderr.strip()) == (130, "interrupted")
    assert time.monotonic() - began < 10


NATIVE = """
import os, sys
from encodepool_worker.cli.quiet import native_stderr_off
before = os.listdir("/proc/self/fd")
for _ in range(3):
    try:
        with native_stderr_off():
            os.write(2, b"native\\n")
            print("python", file=sys.stderr)
            raise KeyError
    except KeyError:
        pass
assert os.listdir("/proc/self/fd") == before
assert sys.stderr is sys.__stderr__
os.write(2, b"native again\\n")
"""


def test_lines_of_native_libraries_stay_off_the_terminal_and_pythons_do_not():
    done = subprocess.run([sys.executable, "-c", NATIVE], capture_output=True, text=True, check=False)

    assert (done.returncode, done.stderr) == (0, "python\n" * 3 + "native again\n")


def test_only_debug_shows_lines_of_native_libraries(run, side, pictures):
    [path] = pictures((64, 64))
    null, seen = os.stat(os.devnull).st_rdev, []

    def ship(side, rank, room, info):
        seen.append(os.fstat(2).st_rdev == null)
        side.write(rank, room, info)
        side.say(rank, info, room, 5)

    side.on_ship = ship
    where = ["--endpoint", side.url, "--bootstrap", f"127.0.0.1:{side.bootstrap[1]}"]

    assert run(path, *where).exit_code == 0
    assert run(path, *where, "--debug").exit_code == 0
    assert seen == [True, False]
    assert os.fstat(2).st_rdev != null


def test_a_closed_stderr_is_no_error():
    code = (
        "import os; os.close(2)\n"
        "from encodepool_worker.cli.quiet import native_stderr_off\n"
        "with native_stderr_off(): print('done')"
    )

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)

    assert (done.returncode, done.stdout) == (0, "done\n")


HIDDEN = """
from importlib.machinery import PathFinder
hidden, find = ("numpy", "torch", "grpc", "zmq", "tokenizers"), PathFinder.find_spec
PathFinder.find_spec = lambda name, *where: None if name in hidden else find(name, *where)
"""


@pytest.mark.parametrize(
    ("program", "arguments", "needs"),
    [
        ("encodepool", ["encode", "x.png", "--endpoints", "F"], "numpy"),
        ("encodepool-worker", ["rows", "x.png", "--model", "M", "--out", "o.npz"], "torch"),
        ("encodepool-worker", ["make-tiny-model", "DIR"], "tokenizers"),
        ("encodepool-worker", ["serve", "--model", "M", "--bootstrap-port", "8998"], "torch"),
    ],
)
def test_a_command_without_its_packages_names_the_extra(program, arguments, needs, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(HIDDEN)
    (tmp_path / "x.png").touch()

    done = subprocess.run(
        [Path(sys.executable).parent / program, *arguments],
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 1, done.stderr
    assert done.stderr.count("\n") == 1
    assert f"`{program} {arguments[0]}` needs {needs}" in done.stderr
    assert done.stderr.endswith("not installed; run: pip install 'encodepool[worker]'\n")
    left = {path.name for path in tmp_path.iterdir()} - {"__pycache__"}
    assert left == {"sitecustomize.py", "x.png"}


def test_norms_lie_where_their_tokens_lie():
    main = np.zeros((6, 4), np.float32)
    main[4] = 3  # second row, second column of three
    tile = Tile("t", np.zeros((64, 96, 3), np.uint8), main, Grid(1, 4, 6), 2)

    assert token_norms(tile).tolist() == [[0, 0, 0], [0, 6, 0]]
    with pytest.raises(ClientError, match="do not cover"):
        token_norms(Tile("t", tile.shown, main[:5], tile.grid, 2))


def test_the_scale_runs_from_dark_to_light():
    ramp = colours(np.linspace(0, 1, 50)) @ np.array([0.2126, 0.7152, 0.0722])

    assert (np.diff(ramp) > -0.5).all()
    assert ramp[-1] - ramp[0] > 180


def test_equal_norms_and_many_pictures_are_drawn():
    tile = Tile(
        "a name that is much too long for its column", np.zeros((32, 32, 3), np.uint8),
        np.ones((1, 4), np.float32), Grid(1, 2, 2), 2,
    )  # fmt: skip

    one, many = draw_heatmap([tile]), draw_heatmap([tile] * 6)

    assert many.height > 1.8 * one.height
    with pytest.raises(ClientError, match="at least one"):
        draw_heatmap([])
