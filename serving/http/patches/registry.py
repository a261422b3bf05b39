# SPDX-License-Identifier: Apache-2.0
"""The internals of uvicorn and Starlette that the server's connections and routes rely on."""

import logging

from serving.http.patches import connections, paths
from serving.patching import patch

log = logging.getLogger(__name__)

PATCHES = (connections.PATCH, paths.PATCH)


def apply() -> None:
    """Apply the patches. Raises Unfit."""
    patch.apply(PATCHES, log)
