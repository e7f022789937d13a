"""Ask a model behind an SMG gateway about a picture: chat.py IMAGE [--url URL] [--model NAME]

Waits until the gateway has workers of each kind: before that, SMG sends pixels to a prefill that may have
no vision tower. Standard library only.
"""

import argparse
import base64
import json
import sys
import time
import urllib.error
import urllib.request

NOT_YET = (404, 503)
"""The gateway has no worker for the model, or not every one it needs."""


def ask(url: str, body: bytes | None, deadline: float) -> str:
    """The answer's text. Raises SystemExit with the gateway's words when it stays out."""
    # What is asked here is near: no proxy in between.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    while True:
        request = urllib.request.Request(url, body, {"content-type": "application/json"})
        try:
            with opener.open(request, timeout=60) as answer:
                return answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                problem = f"{error.code}: {error.read().decode(errors='replace')}"
            hopeless = error.code not in NOT_YET
        except OSError as error:
            problem, hopeless = str(error), False
        if hopeless or time.monotonic() > deadline:
            raise SystemExit(f"no answer from {url}: {problem}")
        time.sleep(0.5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("image", help="a PNG or JPEG file")
    parser.add_argument("--url", default="http://127.0.0.1:30000")
    parser.add_argument("--model", default="tiny-qwen3-vl")
    parser.add_argument("--question", default="what is in the picture?")
    parser.add_argument("--wait", type=float, default=60, metavar="SECONDS", help="for the first answer")
    args = parser.parse_args()
    with open(args.image, "rb") as file:
        picture = base64.b64encode(file.read()).decode()
    kind = "png" if args.image.lower().endswith("png") else "jpeg"
    content = [
        {"type": "image_url", "image_url": {"url": f"data:image/{kind};base64,{picture}"}},
        {"type": "text", "text": args.question},
    ]
    body = {"model": args.model, "max_tokens": 64, "messages": [{"role": "user", "content": content}]}
    deadline = time.monotonic() + args.wait
    ask(f"{args.url}/readiness", None, deadline)
    answer = json.loads(ask(f"{args.url}/v1/chat/completions", json.dumps(body).encode(), deadline))
    print(answer["choices"][0]["message"]["content"])


if __name__ == "__main__":
    sys.exit(main())
