# SPDX-License-Identifier: Apache-2.0
"""A newline at the end of a path makes it another one (serving/api/app.py)."""

from serving.patching.patch import HTTP, Name, Patch

PATCH = Patch(
    name="paths",
    process=HTTP,
    names=(
        Name("starlette.routing:Route.__init__", "self, path, endpoint, ..."),
        Name("starlette.routing:Route", has=("path_regex",)),
    ),
    does="Makes the pattern of a route match a path to its very end.",
    why="Starlette's patterns end with `$`, which also matches before a newline.",
    without="a path with a newline at its end would be answered like the path without it",
    closed=True,
)
