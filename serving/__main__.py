"""`python -m serving VERB`: the verbs, and what the process exits with."""

import os
import signal
import sys
import time


def _stop_early(number: int, frame: object) -> None:
    """End at once: nothing has been started that would have to be stopped."""
    stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    told = f'"time": "{stamp}", "level": "info", "logger": "serving", "message": "stopped"'
    os.write(2, f'{{{told}, "stage": "options"}}\n'.encode())
    os._exit(0)


# Before what takes longer to import: PID 1 never hears of a signal that nothing waits for.
if __name__ == "__main__":
    _ENDING = (signal.SIGTERM, signal.SIGINT)
    if "plan" not in sys.argv:
        for _number in _ENDING:
            signal.signal(_number, _stop_early)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDING)  # entrypoint.sh has them wait until here

import json
import tempfile
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from serving.last_words import Ending

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
        case ["serve"]:
            return _until_the_end(_serve, environ)
        case ["route"]:
            return _until_the_end(_route, environ)
        case ["plan"] | ["plan", "--json"]:
            return _plan(arguments[1:], environ)
        case _:
            print(USAGE, file=sys.stderr)
    return USAGE_ERROR


# Each verb imports only what it needs: `plan` answers without the web server's imports.


def _plan(arguments: list[str], environ: Mapping[str, str]) -> int:
    from lmi_config import explain
    from lmi_config.settings import SettingsError
    from serving.prepare import prepare

    try:
        plan = prepare(environ).plan
    except SettingsError as error:
        print(error, file=sys.stderr)
        return USAGE_ERROR
    if arguments:
        print(json.dumps(explain.as_json(plan), indent=2))
    else:
        print(explain.as_text(plan))
    return 0


def _until_the_end(
    verb: "Callable[[Mapping[str, str]], Ending]", environ: Mapping[str, str]
) -> int:
    """Run a verb that logs. However it ends, the last line says why."""
    from lmi_config.settings import SettingsError
    from serving import last_words, logs
    from serving.last_words import Ending

    logs.configure(environ)
    try:
        ending = verb(environ)
    except SettingsError as error:
        for fault in error.faults if len(error.faults) > 1 else ():  # the last line may cut them
            last_words.log.error("%s", fault)
        ending = Ending(USAGE_ERROR, "options", "; ".join(error.faults))
    except Exception as error:
        last_words.log.exception("an error of Slipway's own")
        ending = Ending(1, "unforeseen", f"{type(error).__name__}: {error}")
    last_words.tell(ending)
    return ending.code


def _serve(environ: Mapping[str, str]) -> "Ending":
    from serving import logs
    from serving.prepare import prepare

    prepared = prepare(environ)
    logs.set_level(prepared.plan.settings.log_level)
    os.environ.update(prepared.plan.environment)  # vLLM reads it when it is imported
    os.environ.update(logs.for_engine(environ, prepared.plan.settings.log_level))
    with logs.folded():
        from serving.server import serve

        return serve(prepared)


def _route(environ: Mapping[str, str]) -> "Ending":
    from lmi_config import settings
    from serving import logs

    asked = settings.read(environ)
    if not asked.router_replicas:
        raise settings.SettingsError(
            ["OPTION_ROUTER_REPLICAS is not set: it names the servers, as http://a:8080"]
        )
    logs.set_level(asked.log_level)
    with tempfile.TemporaryDirectory(prefix="slipway-") as counters:
        if asked.router_processes > 1:  # Prometheus' client reads it when it is imported
            os.environ["PROMETHEUS_MULTIPROC_DIR"] = counters
        from serving.router.server import route

        return route(asked, environ)


if __name__ == "__main__":
    code = main(sys.argv[1:], dict(os.environ))
    # Not sys.exit(): vLLM's libraries do not bear the interpreter being taken down around them.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
