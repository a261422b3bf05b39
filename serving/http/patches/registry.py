# SPDX-License-Identifier: Apache-2.0
"""What the server's connections and routes rely on of uvicorn and Starlette."""

import logging

from serving.http.patches import connections, paths
from serving.patching import patch

log = logging.getLogger(__name__)

PATCHES = (connections.PATCH, paths.PATCH)


def apply() -> None:
    """Raises Unfit."""
    patch.apply(PATCHES, log)
