# SPDX-License-Identifier: Apache-2.0
"""The rules of serve and route for every HTTP request, and the framing of bodies in chunks."""

CHUNK = b"%x\r\n%b\r\n"
"""Frames a part of a body, of its length and its bytes (RFC 9112, 7.1). An empty part would end the
body.
"""
LAST_CHUNK = b"0\r\n\r\n"

MAX_HEAD = 64 * 1024
"""Most bytes of a request's line and headers, and of the head of a replica's answer."""
MAX_HEADERS = 1_000
"""Most headers. Many short headers take far more memory as objects than MAX_HEAD."""
HEAD_S = 30.0
"""Seconds from a connection's handshake, or a head's first byte, to the end of the head."""
HANDSHAKE_S = 5.0
"""Seconds from a new connection to the end of its TLS handshake."""
KEEP_ALIVE_S = 75.0
"""Seconds between two requests: longer than the 60 after which load balancers drop a connection."""
LEAST_RATE = 8 * 1024
"""Lowest bytes per second of a body. A client may fall behind this rate by BEHIND_S, so a body may
also pause for that long. The time does not count while the server does not read.
"""
BEHIND_S = 30.0
AHEAD = 1_000
"""Most requests that a client may send ahead of their answers."""
LINGER_S = 2.0
"""Time for a refused client that is still sending to read the reason. Closing a connection with
unread data resets it, and loses the answer.
"""
NOT_HTTP = "the request is not HTTP/1.1"
TOO_MANY_AHEAD = "too many requests were sent ahead of their answers; wait for some of them"
NO_CODING = "HTTP/1.0 has no Transfer-Encoding; send the body with a Content-Length"
