# SPDX-License-Identifier: Apache-2.0
"""Uvicorn's connections, with limits to size, time and number (serving/http/connections.py)."""

from serving.patching.patch import HTTP, Name, Patch

_IMPL = "uvicorn.protocols.http.httptools_impl"
PATCH = Patch(
    name="connections",
    process=HTTP,
    names=(
        Name(
            f"{_IMPL}:HttpToolsProtocol.__init__",
            "self, config, server_state, app_state, _loop, ...",
        ),
        Name(
            f"{_IMPL}:HttpToolsProtocol",
            has=(
                *("app", "loop", "logger", "access_logger", "parser", "server_state"),
                *("transport", "flow", "scope", "url", "headers", "expect_100_continue", "cycle"),
                *("connection_made", "connection_lost", "data_received", "shutdown"),
                *("on_message_begin", "on_url", "on_header", "on_headers_complete", "on_body"),
                *("on_message_complete", "on_response_complete"),
            ),
        ),
        Name(f"{_IMPL}:HttpToolsProtocol._start_asgi_task", "self, cycle, app"),
        Name(
            f"{_IMPL}:RequestResponseCycle.__init__",
            "self, scope, transport, flow, logger, access_logger, access_log, default_headers, "
            "message_event, expect_100_continue, keep_alive, on_response",
        ),
        Name(
            f"{_IMPL}:RequestResponseCycle",
            has=(
                *("disconnected", "waiting_for_100_continue", "response_started"),
                *("response_complete", "expected_content_length", "chunked_encoding", "body"),
                *("run_asgi", "send", "receive", "send_500_response"),
            ),
        ),
        Name(
            "uvicorn.protocols.http.flow_control:FlowControl",
            has=(*("read_paused", "write_paused", "drain", "pause_reading", "resume_reading"),),
        ),
        Name("uvicorn.server:Server", has=("servers", "started", "lifespan", "capture_signals")),
        Name("uvicorn.server:Server.startup", "self, sockets"),
        Name("uvicorn.server:Server.on_tick", "self, counter"),
        Name(
            "uvicorn.server:ServerState", has=("connections", "total_requests", "default_headers")
        ),
    ),
    does="Limits heads, bodies, waits and the number of connections in subclasses of uvicorn's "
    "classes.",
    why="Uvicorn does not limit the duration of a head or a body, and wraps an app's messages.",
    without="answers could be malformed, and clients could keep connections open indefinitely",
    closed=True,
)
