# SPDX-License-Identifier: Apache-2.0
"""A child of the supervisor's, as a program: `python -m serving.copies DESCRIPTOR`."""

import os
import signal
import socket
import sys
import tempfile
from collections.abc import Callable

from serving.copies.part import CopyPart, Part, RouterPart, take, tell
from serving.exit import Exit, failure, report
from serving.observability import logs, redaction
from serving.process import end_with_parent


def run(part: Part, serve: Callable[[Part], Exit]) -> int:
    """Be what the part says. However it ends, the last line says why, and the supervisor knows."""
    end_with_parent(signal.SIGTERM, part.parent)
    logs.configure(os.environ)
    if isinstance(part, CopyPart):
        logs.name_server(model=part.model) if part.model else logs.name_server(copy=part.number)
    try:
        redaction.hide(os.environ, part.argued)
        end = serve(part)
    except Exception as error:
        end = failure(error)
    report(end)
    tell(part, end)
    logs.flush()
    return end.code


def be(part: Part) -> Exit:
    """Serve as a copy, or route."""
    if isinstance(part, CopyPart):
        return _copy(part)
    assert isinstance(part, RouterPart)
    return _router(part)


def _copy(part: CopyPart) -> Exit:
    os.sched_setaffinity(0, part.cpus)  # before there are threads, which have it from this one
    from serving.observability.capture import capture_output

    plan = part.deployment.plan
    options = plan.settings
    logs.set_format(options.log_format)
    logs.set_level(options.log_level)
    os.environ.update(plan.environment)  # vLLM reads it when it is imported
    os.environ.update(logs.engine_environment(os.environ, options.log_level))
    with capture_output():
        from serving.server.server import serve

        return serve(part.deployment, orders=orders(part))


def orders(part: CopyPart) -> socket.socket | None:
    """The socket for the supervisor's orders, if the part has one."""
    if part.orders is None:
        return None
    found = socket.socket(fileno=part.orders)
    found.set_inheritable(False)
    found.setblocking(False)
    return found


def _router(part: RouterPart) -> Exit:
    options = part.settings
    logs.set_format(options.log_format)
    logs.set_level(options.log_level)
    listener = None if part.listener is None else socket.socket(fileno=part.listener)
    with tempfile.TemporaryDirectory(prefix="slipway-") as counters:
        if options.router_processes > 1:  # Prometheus' client reads it when it is imported
            os.environ["PROMETHEUS_MULTIPROC_DIR"] = counters
        from serving.router.workers import route

        return route(options, os.environ, listener, part.copies, part.models)


if __name__ == "__main__":
    code = run(take(int(sys.argv[1])), be)
    # As in serving.__main__: vLLM's libraries do not bear the interpreter being taken down.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
