"""`python -m serving VERB`: the verbs, and what the process exits with."""

import json
import os
import sys
import tempfile
from collections.abc import Mapping

USAGE = """usage: python -m serving [serve | plan [--json] | route]

  serve   serve a model (the default)
  plan    print what serve would do here, and why; starts nothing
  route   route requests to several servers

Options are environment variables and files; docs/options.md lists them.
"""

USAGE_ERROR = 2
"""What the process exits with when it is called wrongly; `server.py` has the other codes."""


def main(arguments: list[str], environ: Mapping[str, str]) -> int:
    match arguments or ["serve"]:
        case ["serve"] | ["plan"] | ["plan", "--json"]:
            return _planned(arguments, environ)
        case ["route"]:
            return _routed(environ)
        case _:
            print(USAGE, file=sys.stderr)
    return USAGE_ERROR


def _planned(arguments: list[str], environ: Mapping[str, str]) -> int:
    # Each verb imports only what it needs: `plan` answers without the web server's imports, and
    # vLLM's processes, which import this module again, without any.
    from lmi_config import explain
    from lmi_config.settings import SettingsError
    from serving.prepare import prepare

    try:
        prepared = prepare(environ)
    except SettingsError as error:
        print(error, file=sys.stderr)
        return USAGE_ERROR
    if arguments == ["plan"]:
        print(explain.as_text(prepared.plan))
        return 0
    if arguments == ["plan", "--json"]:
        print(json.dumps(explain.as_json(prepared.plan), indent=2))
        return 0
    os.environ.update(prepared.plan.environment)  # vLLM reads it when it is imported
    from serving import logs
    from serving.server import serve

    logs.configure(environ)
    return serve(prepared)


def _routed(environ: Mapping[str, str]) -> int:
    from lmi_config import settings
    from serving import logs

    try:
        asked = settings.read(environ)
        if not asked.router_replicas:
            raise settings.SettingsError(
                ["OPTION_ROUTER_REPLICAS is not set: it names the servers, as http://a:8080"]
            )
    except settings.SettingsError as error:
        print(error, file=sys.stderr)
        return USAGE_ERROR
    logs.configure(environ)
    with tempfile.TemporaryDirectory(prefix="slipway-") as counters:
        if asked.router_processes > 1:  # Prometheus' client reads it when it is imported
            os.environ["PROMETHEUS_MULTIPROC_DIR"] = counters
        from serving.router.server import route

        return route(asked, environ)


# vLLM's processes are spawned and import this module again.
if __name__ == "__main__":
    code = main(sys.argv[1:], dict(os.environ))
    # Not sys.exit(): vLLM's libraries do not bear the interpreter being taken down around them.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
