"""One TokenSpeed endpoint in a process of its own, driven by JSON lines.

    python -m tests.peers.tokenspeed.serve {prefill|encode|language} '{"tp_size": 2}'

Standard input carries requests ``{"method": "ask", "params": {...}}``, standard output one answer
each, in order: ``{"ok": value}`` or ``{"error": traceback}``. The first answer comes unasked: the
endpoint is up, or why not. The process ends when standard input does.
"""

import json
import os
import sys
import traceback
from typing import Any, TextIO

from . import stubs


def make(kind: str, params: dict[str, Any]) -> Any:
    """Import TokenSpeed and build the endpoint; ``local_ip`` is where its peers reach it."""
    stubs.install(params.pop("local_ip", "127.0.0.1"))
    if kind == "encode":
        from .encode import EncodeHost

        return EncodeHost(**params)
    if kind == "language":
        from ..smg.language import LanguageHost

        return LanguageHost(**params)
    from .prefill import PrefillHost

    return PrefillHost(**params)


def answer(out: TextIO, **message: object) -> None:
    print(json.dumps(message), file=out, flush=True)


def main(kind: str, params: str) -> None:
    # Whatever a library prints goes to standard error: standard output is the protocol.
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    try:
        host = make(kind, json.loads(params))
    except Exception:  # noqa: BLE001 - the caller is told, whatever it is
        answer(out, error=traceback.format_exc())
        os._exit(1)
    answer(out, ok=None)
    for line in sys.stdin:
        request = json.loads(line)
        method = request["method"]
        try:
            if method.startswith("_"):
                raise AttributeError(method)
            answer(out, ok=getattr(host, method)(**request["params"]))
        except Exception:  # noqa: BLE001 - the caller is told, whatever it is
            answer(out, error=traceback.format_exc())
    # TokenSpeed's and Mooncake's threads never end by themselves.
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
