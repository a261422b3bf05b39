# SPDX-License-Identifier: Apache-2.0
"""A local stand-in for SageMaker, for unmodified boto3 clients, and a check of containers.

`local` answers `sagemaker` and `sagemaker-runtime` clients whose endpoint_url leads here, and runs
the containers of their endpoints on this machine: with Docker, or as processes where the Image is
`process:PROGRAM` and `--program PROGRAM` names it. Clients sign with the key that is printed at the
start. `check URL` runs SageMaker's contract against a container that runs already.
"""

import argparse
import asyncio
import json
import logging
import signal
import sys
from concurrent.futures import Future
from pathlib import Path

from tools.sagemaker_local import contract
from tools.sagemaker_local.container import Limits
from tools.sagemaker_local.server import ACCOUNT, REGION, Options, serve
from tools.sagemaker_local.wire import new_key

BODY = '{"prompt": "Hello", "max_tokens": 8, "temperature": 0}'


async def _serve_until_signal(options: Options) -> None:
    opened: Future[str] = Future()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    key = new_key()

    def tell(opened: "Future[str]") -> None:
        print(f"SageMaker stand-in at {opened.result()}; Ctrl-C ends it. Its key:")
        print(f"export AWS_ACCESS_KEY_ID={key.id}")
        print(f"export AWS_SECRET_ACCESS_KEY={key.secret}", flush=True)

    opened.add_done_callback(tell)
    await serve(options._replace(key=key), opened, stop)


def _place(text: str) -> Path | str:
    return text if text.startswith(("http://", "https://")) else Path(text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="scripts/sagemaker", description=__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True)
    local = verbs.add_parser("local", help="stand in for SageMaker")
    local.add_argument("--port", type=int, default=9000)
    local.add_argument(
        "--s3",
        type=_place,
        help="what stands for S3: a folder (s3://a/b is FOLDER/a/b), or the URL of an S3 server",
    )
    local.add_argument(
        "--work", type=Path, help="where containers' files and logs go (a new folder)"
    )
    local.add_argument(
        "--program",
        action="append",
        default=[],
        dest="programs",
        help="a program that an Image may name, as process:PROGRAM; may be given several times",
    )
    local.add_argument("--region", default=REGION)
    local.add_argument("--account", default=ACCOUNT)
    local.add_argument("--seed", type=int, default=0, help="of how streams are cut")
    local.add_argument("--duplicate-posts", action="store_true", help="register each adapter twice")
    local.add_argument(
        "--broken-streams", type=float, default=0, help="share that ends in InternalStreamFailure"
    )
    for name, help_text in LIMITS.items():
        default = Limits._field_defaults[name]
        local.add_argument(
            f"--{name.replace('_', '-')}",
            type=int if name.endswith("bytes") else float,
            default=default,
            help=help_text + ("" if default is None else f" ({default})"),
        )
    check_ = verbs.add_parser("check", help="run SageMaker's contract against a container")
    check_.add_argument("url", help="like http://127.0.0.1:8080")
    check_.add_argument("--body", default=BODY, help="of a request that it answers (%(default)s)")
    check_.add_argument("--adapter", type=Path, help="a LoRA adapter; the container sees this path")
    check_.add_argument("--pid", type=int, help="of the container's process, which gets a SIGTERM")
    check_.add_argument("--only", nargs="+", default=[], metavar="RULE", choices=[*contract.RULES])
    check_.add_argument("--json", action="store_true", dest="as_json")
    return parser


LIMITS = {
    "answer_s": "seconds for an answer",
    "stream_s": "seconds for a stream",
    "ping_s": "seconds for /ping",
    "accept_s": "seconds until a connection is accepted",
    "ping_every_s": "seconds between pings",
    "stop_s": "seconds between SIGTERM and SIGKILL",
    "startup_s": "seconds to become healthy, in the place of what the endpoint says",
    "load_s": "seconds to load a model of a multi-model endpoint",
    "scrape_s": "seconds between scrapes of /metrics, likewise",
    "header_bytes": "bytes of an answer's headers",
    "payload_bytes": "bytes of a request; SageMaker's own model says 6291456, its guide 25 MB",
}


def _check(
    url: str,
    body: str,
    adapter: Path | None,
    pid: int | None,
    only: list[str],
    as_json: bool,
) -> int:
    """Print the score sheet. Returns the exit code: 0 where no rule is broken."""
    folder = adapter.resolve() if adapter else None
    container = contract.Container(url, json.loads(body), folder, pid)
    results = asyncio.run(contract.run(container, only))
    if as_json:
        print(json.dumps([it._asdict() for it in results], indent=1))
    else:
        print(contract.sheet(results))
    return int(any(it.verdict == "fail" for it in results))


def main() -> None:
    options = vars(_parser().parse_args())
    if options.pop("verb") == "check":
        sys.exit(_check(**options))
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    limits = Limits(**{name: options.pop(name) for name in Limits._fields})
    asyncio.run(_serve_until_signal(Options(limits=limits, **options)))


if __name__ == "__main__":
    main()
