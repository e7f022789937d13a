"""A language model's place beside the gateway, for a machine or a cluster without GPUs:

    python -m tests.peers.smg --model DIR --name NAME --prefill PORT --decode PORT [--host H] [--list FILE]

Prefill receives embeddings with TokenSpeed's own code and answers when they are there; decode answers
with canned words. One line of JSON on standard output for each image. ``--list`` writes both as a manifest
for `encodepool endpoints`. Ends with SIGTERM.
"""

import argparse
import json
import os
import signal
import threading
from pathlib import Path
from typing import Any

from ..tokenspeed import stubs


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, metavar="DIR", help="the folder of the checkpoint")
    parser.add_argument("--name", required=True, help="served model name, as the encode workers say it")
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to bind, and for encode workers to reach"
    )
    for role in ("prefill", "decode"):
        parser.add_argument(f"--{role}", type=int, metavar="PORT", help=f"serve {role} there")
    parser.add_argument("--list", type=Path, metavar="FILE", help="write the workers as a manifest")
    args = parser.parse_args()
    ports = {role: port for role in ("prefill", "decode") if (port := getattr(args, role)) is not None}
    if not ports:
        parser.error("give --prefill, --decode or both")

    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    stubs.install(args.host)
    from .language import LanguageHost

    def tell(record: dict[str, Any]) -> None:
        # In one piece: `print` writes the end of the line by itself, and many threads tell.
        print(json.dumps(record) + "\n", end="", flush=True)

    host = LanguageHost(args.model, args.name, host=args.host, ports=ports, tell=tell)
    if args.list is not None:
        args.list.write_text(json.dumps({"version": 1, "workers": host.workers()}) + "\n")
    print(f"serving {', '.join(ports)} on {args.host}", flush=True)
    ended.wait()
    # TokenSpeed's and Mooncake's threads never end by themselves.
    os._exit(0)


if __name__ == "__main__":
    main()
