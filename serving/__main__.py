"""`python -m serving VERB`: the verbs, and what the process exits with."""

import os
import sys
from collections.abc import Mapping

from lmi_config import machine, settings, vllm_args
from serving import logs, sources

USAGE = """usage: python -m serving [serve | plan | route]

  serve   serve a model (the default)
  plan    print what serve would do here, and why; not yet
  route   route requests to several servers; not yet

Options are environment variables; the README lists them.
"""

USAGE_ERROR = 2
"""What the process exits with when it is called wrongly; `server.py` has the other codes."""


def main(arguments: list[str], environ: Mapping[str, str]) -> int:
    verb = arguments[0] if arguments else "serve"
    if verb in ("plan", "route") and len(arguments) == 1:
        print(f"{verb} is not there yet", file=sys.stderr)
        return USAGE_ERROR
    if verb != "serve" or len(arguments) > 1:
        print(USAGE, file=sys.stderr)
        return USAGE_ERROR
    try:
        asked = settings.read(environ)
        sources.check(asked.model_id)
        here = machine.look(environ)
        engine_arguments = vllm_args.arguments(asked, here)
        engine_environment = vllm_args.environment(asked, here, environ)
    except settings.SettingsError as error:
        print(error, file=sys.stderr)
        return USAGE_ERROR
    os.environ.update(engine_environment)  # vLLM reads the environment when it is imported
    logs.configure()
    from serving.server import serve  # the verbs above answer without the web server's imports

    return serve(asked, engine_arguments)


# vLLM's processes are spawned and import this module again.
if __name__ == "__main__":
    code = main(sys.argv[1:], dict(os.environ))
    # Not sys.exit(): vLLM's libraries do not bear the interpreter being taken down around them.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
