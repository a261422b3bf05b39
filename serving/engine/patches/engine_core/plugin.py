# SPDX-License-Identifier: Apache-2.0
"""Slipway as a plugin of vLLM's: it applies patches and adds a model loader at the start of vLLM's
processes.

vLLM finds the plugin by slipway.dist-info, beside the package `serving`. It calls `load` in the
server's process, in the engine core's and in each worker's. `load` does nothing unless a server of
Slipway's has asked for it; plain vLLM may also find the plugin.
"""

import os
from collections.abc import MutableMapping
from importlib.metadata import entry_points

from serving.patching.patch import Unfit

GROUP = "vllm.general_plugins"
NAME = "slipway"
_WANTED = "SLIPWAY_ENGINE_PATCHES"
_ADAPTERS, _LOADER = "adapters", "loader"
_ALLOWED = "VLLM_PLUGINS"

_loaded = False


def want(
    environ: MutableMapping[str, str], *, adapters: bool = False, loader: bool = False
) -> None:
    """Choose the parts for the processes of the engine that is about to start: the patches for
    adapters, and the model loader.

    Raises Unfit if vLLM would not find the plugin.
    """
    environ.pop(_WANTED, None)
    wanted = [name for name, it in ((_ADAPTERS, adapters), (_LOADER, loader)) if it]
    if not wanted:
        return
    if not entry_points(group=GROUP, name=NAME):
        raise Unfit(
            "vLLM would not find Slipway's plugin, without which rows of the base model could get "
            "an adapter's weights, and no model can be loaded while it is fetched: "
            "slipway.dist-info has to be beside `serving`; put it there"
        )
    environ[_WANTED] = ",".join(wanted)
    if (allowed := environ.get(_ALLOWED)) is not None and NAME not in allowed.split(","):
        environ[_ALLOWED] = f"{allowed},{NAME}"


def load() -> None:
    """The plugin's entry point, called by vLLM. Raises Unfit, which ends the calling process."""
    global _loaded
    wanted = os.environ.get(_WANTED, "").split(",")
    if _ADAPTERS in wanted:
        from serving.engine.patches.engine_core import registry

        registry.apply_adapters()
        _loaded = True
    if _LOADER in wanted:
        from serving.engine.weights import loader

        loader.register()
        _loaded = True


def require() -> None:
    """Raise Unfit if vLLM has not called `load` in this process, although it should have by now."""
    if os.environ.get(_WANTED) and not _loaded:
        raise Unfit(
            "vLLM has not loaded Slipway's plugin, without which adapters could be mixed up, and "
            "no model can be loaded while it is fetched"
        )
