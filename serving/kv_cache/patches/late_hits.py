# SPDX-License-Identifier: Apache-2.0
"""A look-up uses chunks that came into memory while it asked the stores."""

import functools
from typing import Any

from serving.patching.patch import CACHE_SERVER, Name, Patch, replace

_CONTROLLERS = "lmcache.v1.distributed.storage_controllers"


def _put() -> None:
    from lmcache.v1.distributed.storage_controllers.prefetch_controller import PrefetchController

    def locking(transition: Any) -> Any:
        @functools.wraps(transition)
        def transitioned(self: Any, request: Any) -> None:
            _lock(self, request)
            transition(self, request)

        return transitioned

    replace(PrefetchController, "_transition_to_load_phase", locking)


def _lock(controller: Any, request: Any) -> None:
    """Lock the chunks that a store has and that are in memory by now, as LMCache does before it
    asks the stores. All loads end in this thread, so none ends between this and the reservation.
    """
    from lmcache.v1.distributed.error import L1Error

    states = request.key_states
    stored = states.l2_locked_keys.merge()
    if not len(stored):
        return
    for index, manager in controller._l1_managers.items():
        absent = stored - states.l1_locked_keys[index]
        late = absent.zeros_like()
        for group, row, found in zip(request.key_groups, absent, late, strict=True):
            columns = row.get_indices_list()
            keys = [group.keys[column] for column in columns]
            locked = manager.reserve_read(keys, request.num_kv_readers) if keys else {}
            for column, key in zip(columns, keys, strict=True):
                if locked[key][0] == L1Error.SUCCESS:
                    found.set(column)
        if late.popcount():
            states.l1_locked_keys[index] = states.l1_locked_keys[index] + late


PATCH = Patch(
    name="late_hits",
    process=CACHE_SERVER,
    names=(
        Name(
            f"{_CONTROLLERS}.prefetch_controller:PrefetchController._transition_to_load_phase",
            "self, request",
        ),
        Name(f"{_CONTROLLERS}.prefetch_controller:PrefetchController", has=("_l1_managers",)),
        Name(
            f"{_CONTROLLERS}.prefetch_controller:InFlightPrefetchRequest",
            has=("key_states", "key_groups", "num_kv_readers"),
        ),
        Name(
            f"{_CONTROLLERS}.prefetch_controller:PrefetchKeyState",
            has=("l1_locked_keys", "l2_locked_keys"),
        ),
        Name("lmcache.v1.distributed.l1_manager:L1Manager", has=("reserve_read",)),
    ),
    does="Counts a chunk as a hit that has come into memory while a look-up asked the stores.",
    why="LMCache cannot reserve memory for such a chunk, and ends the prompt's hit before it. That "
    "happens if a load of the same prompt ends at that moment.",
    without="conversations are not read into memory before their next turn",
    closed=False,
    put=_put,
)
