# SPDX-License-Identifier: Apache-2.0
"""The page for people: its files, and the headers they are sent with. The page is static, and the
same in `serve` and `route`. It requests its data with the key that its reader enters.
"""

from pathlib import Path

from serving.protocol import UI

_KINDS = {".html": b"text/html", ".css": b"text/css", ".js": b"text/javascript"}


def _file(name: str) -> tuple[bytes, bytes]:
    path = Path(__file__).with_name(name)
    return _KINDS[path.suffix] + b"; charset=utf-8", path.read_bytes()


FILES = {
    UI: _file("page.html"),
    f"{UI}/page.css": _file("page.css"),
    f"{UI}/page.js": _file("page.js"),
}
"""Path → content type and content."""

HEADERS = {
    # Nothing from elsewhere, no inline script or style; and the browser refuses to make HTML of
    # text, which models write and clients name things by.
    b"content-security-policy": b"default-src 'none'; script-src 'self'; style-src 'self'; "
    b"connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
    b"frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'",
    b"x-content-type-options": b"nosniff",
    b"referrer-policy": b"no-referrer",
    b"cross-origin-opener-policy": b"same-origin",
    b"cache-control": b"no-cache",
}
LINES = tuple(b"%b: %b" % header for header in HEADERS.items())
"""The same as lines of a head."""
