# SPDX-License-Identifier: Apache-2.0
"""Send the same long document twice, and print the time and the cached tokens of each answer.

python -m examples.tutorial.ask_twice URL
"""

import json
import sys
import time
import urllib.request

DOCUMENT = "The import statement is one of many that bind names. " * 120


def ask(url: str) -> str:
    body = {"model": "lmi", "prompt": DOCUMENT, "max_tokens": 1, "temperature": 0}
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)
    began = time.monotonic()
    with urllib.request.urlopen(request) as answer:
        usage = json.load(answer)["usage"]
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    took = time.monotonic() - began
    return f"{took:.2f} s, {cached:,} of {usage['prompt_tokens']:,} prompt tokens cached"


if __name__ == "__main__":
    print("first answer:", ask(sys.argv[1]))
    time.sleep(2)  # until the tiers have stored the KV
    print("second answer:", ask(sys.argv[1]))
