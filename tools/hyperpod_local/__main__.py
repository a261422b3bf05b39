# SPDX-License-Identifier: Apache-2.0
"""A local stand-in for HyperPod's inference operator.

`apply` reads an InferenceEndpointConfig and runs its endpoint on this machine until Ctrl-C. It
starts a process of Slipway for each replica, with the container's arguments and variables and the
operator's additions for kvCacheSpec. It also starts a stand-in for tiered storage, or Valkey, and
the router, by intelligentRoutingSpec. With pdSpec some of the replicas prefill, and the others
decode. `get` shows the running endpoints. Words after `--` are added to the arguments of every
container, like `-- --tensor-parallel-size 1`.
"""

import argparse
import signal
import sys
import tempfile
import threading
from pathlib import Path

from lmi_config.options import redaction
from tests.support.models import default
from tools.hyperpod_local import manifest
from tools.hyperpod_local.manifest import ManifestError
from tools.hyperpod_local.operator import Operator, running, table


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="scripts/hyperpod", description=__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True)
    apply_ = verbs.add_parser("apply", help="run an endpoint here")
    apply_.add_argument("file", type=Path, help="an InferenceEndpointConfig")
    apply_.add_argument("--model", help="a folder or hub id, in the place of modelSourceConfig")
    apply_.add_argument("--port", type=int, default=8000, help="of the endpoint (%(default)s)")
    apply_.add_argument("--l1", type=float, default=1, help="GiB of L1 of a replica (%(default)s)")
    apply_.add_argument("--logs", type=Path, help="a folder for the logs, which are else removed")
    verbs.add_parser("get", help="show what runs")
    return parser


def _model(endpoint: manifest.Endpoint, named: str | None) -> tuple[str, list[str]]:
    """The model that is served instead of the manifest's, and notes about it for the user."""
    folder = endpoint.folder
    if named or endpoint.hub_id:
        return str(named or endpoint.hub_id), []
    if folder and folder.is_dir() and any(folder.iterdir()):
        return str(folder), []
    made = default.make()
    return str(made), [f"{folder} is not on this machine; {made} stands for it"] if folder else []


def _apply(options: argparse.Namespace, more: list[str]) -> int:
    ending = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: ending.set())
    with tempfile.TemporaryDirectory(prefix="hyperpod-") as folder:
        logs = options.logs or Path(folder)
        logs.mkdir(parents=True, exist_ok=True)
        try:
            endpoint = manifest.read(options.file)
            model, notes = _model(endpoint, options.model)
            operator = Operator(
                endpoint, model=model, port=options.port, folder=logs, more=more, l1_gib=options.l1
            )
        except (ManifestError, OSError) as error:
            print(f"{options.file}: {redaction.masked(str(error))}", file=sys.stderr)
            return 2
        kind = f"{manifest.KIND}.{manifest.API.partition('/')[0]}".lower()
        print(f"{kind}/{endpoint.name} created, logs in {logs}", flush=True)
        for note in (*endpoint.notes, *notes):
            print(f"note: {note}", flush=True)
        with operator:
            good = operator.keep(lambda text: print(text, flush=True), ending.wait)
        return 0 if good else 1


def main() -> int:
    words = sys.argv[1:]
    more = words[words.index("--") + 1 :] if "--" in words else []
    options = _parser().parse_args(words[: words.index("--")] if "--" in words else words)
    if options.verb == "apply":
        return _apply(options, more)
    found = running()
    if not found:
        print("No resources found")
        return 0
    print(table([it["endpoint"] for it in found]), "", sep="\n")
    print(table([pod for it in found for pod in it["pods"]]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
