"""Plain requests of the kit's own: few, small, and without a proxy whatever the environment says."""

import http.client
import json
import ssl
from typing import Any
from urllib.parse import urlsplit

TIMEOUT_S = 10.0


class Refused(OSError):
    """The server answered with an error."""


def ask(
    url: str, method: str = "GET", body: object = None, kind: str = "", context: ssl.SSLContext | None = None
) -> Any:
    """The decoded answer, or text where it is not JSON. ``kind`` is the content type of ``body``.

    Raises Refused for a status from 400 on, other OSErrors when there is no answer.
    """
    parts = urlsplit(url)
    assert parts.hostname is not None
    connection = (
        http.client.HTTPSConnection(parts.hostname, parts.port, timeout=TIMEOUT_S, context=context)
        if parts.scheme == "https"
        else http.client.HTTPConnection(parts.hostname, parts.port, timeout=TIMEOUT_S)
    )
    try:
        content = None if body is None else json.dumps(body)
        path = f"{parts.path}?{parts.query}" if parts.query else parts.path
        connection.request(method, path, content, {"Content-Type": kind} if kind else {})
        answer = connection.getresponse()
        text = answer.read().decode()
    except http.client.HTTPException as error:
        raise ConnectionError(f"{method} {url}: {error!r}") from error
    finally:
        connection.close()
    if answer.status >= 400:
        raise Refused(f"{method} {url}: {answer.status} {text}")
    return json.loads(text) if text[:1] in ("{", "[") else text
