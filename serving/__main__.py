# SPDX-License-Identifier: Apache-2.0
"""`python -m serving VERB`: the verbs, and the exit code."""

import os
import signal
import sys
import time


def _stop_early(number: int, frame: object) -> None:
    """End at once: nothing was started yet."""
    stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    line = f'"time": "{stamp}", "level": "info", "logger": "serving", "message": "stopped"'
    os.write(2, b"stopped\n" if os.isatty(2) else f'{{{line}, "stage": "options"}}\n'.encode())
    os._exit(0)


# This comes before the slow imports: PID 1 never gets a signal without a handler.
if __name__ == "__main__":
    _ENDING = (signal.SIGTERM, signal.SIGINT)
    if "plan" not in sys.argv:
        for _number in _ENDING:
            signal.signal(_number, _stop_early)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDING)  # entrypoint.sh has blocked them

import asyncio
import functools
import json
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from lmi_config.options import arguments, parsers, settings
from lmi_config.options.declared import SELF_SIGNED, Settings
from lmi_config.options.option_files import Given
from lmi_config.options.settings import SettingsError
from lmi_config.plan import explain
from serving.exit import USAGE_ERROR, Exit, failure, report
from serving.observability import logs, redaction

USAGE = """usage: python -m serving [serve | warm | plan | tune | route] [ARGUMENT ...]
       python -m serving keys new NAME [--tenant TENANT]
       python -m serving [vllm serve] ARGUMENT ...

  serve   serve a model (the default)
  warm    start as serve does, fill the folder of OPTION_CACHE_FOLDER, and end
  plan    print what serve would do here, and why; starts nothing
  tune    measure configurations of serve, and write the options of the best one
  route   route requests to several servers
  keys    make an API key, and its lines for OPTION_API_KEYS_FILE

Arguments without a verb mean serve, as vLLM's image takes them, and its port 8000 if none is named.
`python -m serving serve --help` lists the options, which are arguments or environment variables.
"""


def main(argv: list[str], environ: Mapping[str, str]) -> int:
    called = arguments.called(argv, environ)
    if called is None:
        print(USAGE, file=sys.stderr)
        return USAGE_ERROR
    verb, rest, environ = called
    if arguments.wants_help(rest):
        if verb == "keys":
            print(USAGE, end="")
            return 0
        print(arguments.usage(verb), end="")
        return 0
    return _VERBS[verb](rest, environ)


# Each verb imports its own modules: `plan` answers without the web server's imports.


def _plan(rest: list[str], environ: Mapping[str, str]) -> int:
    from serving.models import offered
    from serving.server.prepare import prepare

    redaction.hide(environ)  # the value of another option may contain a secret
    try:
        argued = arguments.read("plan", rest)
        redaction.hide(environ, argued)
        if several := offered.offers(environ, argued):
            shown = offered.as_json(several) if arguments.AS_JSON in rest else None
            text = json.dumps(shown, indent=2) if shown else offered.as_text(several)
            print(redaction.redacted(text))
            return 0
        plan = prepare(environ, argued).plan
    except SettingsError as error:
        print(redaction.redacted(str(error)), file=sys.stderr)
        return USAGE_ERROR
    if arguments.AS_JSON in rest:
        print(json.dumps(redaction.plain(explain.as_json(plan)), indent=2))
    else:
        print(redaction.redacted(explain.as_text(plan)))
    return 0


def _tune(rest: list[str], environ: Mapping[str, str]) -> int:
    from serving.tune.tune import tune

    redaction.hide(environ)
    try:
        redaction.hide(environ, arguments.read("tune", rest))
        return tune(rest, environ)
    except SettingsError as error:
        print(redaction.redacted(str(error)), file=sys.stderr)
        return USAGE_ERROR


def _run(
    name: str,
    verb: Callable[[Mapping[str, str], Mapping[str, Given]], Exit],
    rest: list[str],
    environ: Mapping[str, str],
) -> int:
    """Run a verb that logs. Its last line has the reason of its end. Returns the exit code."""
    logs.configure(environ)
    try:
        argued = arguments.read(name, rest)
        redaction.hide(environ, argued)
        end = verb(environ, argued)
    except Exception as error:
        end = failure(error)
    report(end)
    logs.flush()
    return end.code


def _warm(environ: Mapping[str, str], argued: Mapping[str, Given]) -> Exit:
    one = Given("1", "warm")  # every copy compiles the same
    return _serve(environ, {**argued, "OPTION_COPIES": one}, warm=True)


def _serve(environ: Mapping[str, str], argued: Mapping[str, Given], warm: bool = False) -> Exit:
    from serving.access.access import Access
    from serving.kv_cache import pool
    from serving.models.offered import offers
    from serving.observability.capture import capture_output
    from serving.server.prepare import prepare

    with pool.cleanup():  # before the machine's memory is measured
        if several := None if warm else offers(environ, argued):
            logs.set_format(several.settings.log_format)
            logs.set_level(several.settings.log_level)
            asyncio.run(Access(several.settings).require())
            with capture_output():
                from serving.models.model_supervisor import supervise as supervise_models

                return supervise_models(several)
        deployment = prepare(environ, argued)
        options = deployment.plan.settings
        if warm and not deployment.plan.compile_cache:
            raise SettingsError(
                ["OPTION_CACHE_FOLDER is not set: warm fills it; name a folder on a volume"]
            )
        logs.set_format(options.log_format)
        logs.set_level(options.log_level)
        asyncio.run(Access(options).require())
        if deployment.plan.copies:
            with capture_output():
                from serving.copies.supervisor import supervise

                return supervise(deployment, argued)
        os.environ.update(deployment.plan.environment)  # vLLM reads it when it is imported
        os.environ.update(logs.engine_environment(environ, options.log_level))
        with capture_output():
            from serving.server.server import serve

            return serve(deployment, warm)


def _epp_faults(options: Settings) -> list[str]:
    """Return the options' faults for an endpoint picker."""
    from serving.http import tls

    faults = []
    certificate, key = options.epp_certificate, options.epp_private_key
    if certificate == SELF_SIGNED and key:
        faults.append(
            f"OPTION_EPP_PRIVATE_KEY: OPTION_EPP_CERTIFICATE={SELF_SIGNED} has none; leave it out"
        )
    elif bool(certificate) != bool(key) and certificate != SELF_SIGNED:
        faults.append("OPTION_EPP_CERTIFICATE and OPTION_EPP_PRIVATE_KEY: TLS needs both")
    elif certificate and key:
        try:
            tls.pair(Path(certificate), Path(key))
        except ValueError as error:
            faults.append(f"OPTION_EPP_CERTIFICATE: {error}")
    source = parsers.replica_source(options.router_replicas or "")
    if isinstance(source, frozenset):
        faults += [
            f"OPTION_ROUTER_REPLICAS: {url}: gateways need IP addresses, not names"
            for url in sorted(source)
            if not parsers.is_address(url)
        ]
    return faults


def _route(environ: Mapping[str, str], argued: Mapping[str, Given]) -> Exit:
    options = settings.read(environ, argued)
    if not options.router_replicas:
        raise SettingsError(
            [
                "OPTION_ROUTER_REPLICAS is not set: it names the servers, as http://a:8080; "
                "`route http://a:8080 http://b:8080` does as well"
            ]
        )
    from serving.access.access import Access
    from serving.access.objectives import Objectives
    from serving.http.tls import ServerTls

    access = Access(options, routes=True)  # reads the keys file; a fault in it stops the start here
    Objectives(options)
    if options.epp and (faults := _epp_faults(options)):
        raise SettingsError(faults)
    ServerTls(options)
    logs.set_format(options.log_format)
    logs.set_level(options.log_level)
    asyncio.run(access.require())
    with tempfile.TemporaryDirectory(prefix="slipway-") as counters:
        if options.router_processes > 1:  # Prometheus' client reads it when it is imported
            os.environ["PROMETHEUS_MULTIPROC_DIR"] = counters
        from serving.router.workers import route

        return route(options, environ)


def _keys(rest: list[str], environ: Mapping[str, str]) -> int:
    """Print a new key, and its lines for OPTION_API_KEYS_FILE."""
    from serving.access import keys

    match rest:
        case ["new", name]:
            tenant = None
        case ["new", name, "--tenant", tenant]:
            pass
        case _:
            print(USAGE, file=sys.stderr)
            return USAGE_ERROR
    key = keys.made()
    try:
        row = keys.row(name, key, tenant)
    except ValueError as error:
        print(f"{name!r} cannot be a key's name: {error}", file=sys.stderr)
        return USAGE_ERROR
    print(f"# The key, which is not stored: {key}\n# For the file of keys, below `keys:`\n{row}")
    return 0


_VERBS: Mapping[str, Callable[[list[str], Mapping[str, str]], int]] = {
    "serve": functools.partial(_run, "serve", _serve),
    "warm": functools.partial(_run, "warm", _warm),
    "plan": _plan,
    "tune": _tune,
    "route": functools.partial(_run, "route", _route),
    "keys": _keys,
}


if __name__ == "__main__":
    code = main(sys.argv[1:], dict(os.environ))
    # Not sys.exit(): vLLM's libraries may crash while the interpreter shuts down.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
