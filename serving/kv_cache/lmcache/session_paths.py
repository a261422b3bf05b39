# SPDX-License-Identifier: Apache-2.0
"""In LMCache's server: paths about conversations, beside those of LMCache's HTTP interface.

Only Slipway's server asks them, on this machine. Names of conversations are digests.
"""

from collections.abc import Sequence

from lmcache.v1.distributed.api import ObjectKey
from lmcache.v1.distributed.storage_manager import StorageManager
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from serving.kv_cache.lmcache.read_ahead import ReadAhead
from serving.kv_cache.lmcache.retention import Retention
from serving.kv_cache.session_client import PATH


def add(app: Starlette, retention: Retention, ahead: ReadAhead | None) -> None:
    """Add the paths to LMCache's app, whose state has the engine once it has started. ahead: None
    if nothing may be read ahead.
    """

    def tokens(keys: Sequence[ObjectKey]) -> int:
        """Return the tokens of the chunks. A chunk has a key for each rank and layer group."""
        size: int = app.state.engine.context.chunk_size
        return len({key.chunk_hash for key in keys}) * size

    def kept(request: Request) -> JSONResponse:
        session = request.path_params["session"]
        if request.method == "DELETE":
            if request.query_params.get("forget") == "true":
                _delete(app.state.engine.context.storage_manager, retention.own(session))
            return JSONResponse({"tokens": tokens(retention.end(session))})
        lease = retention.lease(session)
        if not lease:
            return JSONResponse({})
        return JSONResponse({"tokens": tokens(lease.keys), "seconds": lease.seconds})

    def prefetch(request: Request) -> JSONResponse:
        session = request.path_params["session"]
        lease = retention.lease(session)
        stores = app.state.engine.context.storage_manager.l2_adapters()
        if not (lease and ahead and stores and ahead.ask(session)):
            return JSONResponse({})
        return JSONResponse({"tokens": tokens(lease.keys), "seconds": lease.seconds})

    one = f"{PATH}/{{session}}"
    app.router.routes += [
        Route(one, kept, methods=["GET", "DELETE"]),
        Route(f"{one}/prefetch", prefetch, methods=["POST"]),
    ]


def _delete(storage: StorageManager, keys: Sequence[ObjectKey]) -> None:
    """Delete chunks in all tiers, except those in memory that a request reads or writes just now.
    Raises what a store raises.
    """
    storage.delete_l1_keys([*keys])
    for _, store in storage.l2_adapters():
        store.delete([*keys])
