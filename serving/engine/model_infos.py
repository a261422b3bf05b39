# SPDX-License-Identifier: Apache-2.0
"""`python -m serving.engine.model_infos FOLDER`: write what vLLM asks about each architecture.

vLLM imports a model's class in another process to list its abilities, for about 10 s of CPU time,
and keeps the answer in VLLM_CACHE_ROOT/modelinfos. The image's build runs this once for all
architectures, in one process. An answer for another version of the class is not used by vLLM.
"""

import os
import sys
from pathlib import Path


def write(folder: Path) -> tuple[int, list[str]]:
    """Write a file for each architecture that can be imported here. Returns their number, and the
    names of the others.
    """
    os.environ["VLLM_CACHE_ROOT"] = str(folder.parent)
    from vllm.model_executor.models import registry

    # Private: vLLM (0.32) would start a process for each. Without the name this only takes longer.
    registry._run_in_subprocess = lambda function: function()
    failed = []
    for name, model in registry.ModelRegistry.models.items():
        try:
            model.inspect_model_cls()
        except Exception:  # it needs a package or a device that is not here
            failed.append(name)
    return len([*folder.glob("*.json")]), failed


if __name__ == "__main__":
    into = Path(sys.argv[1])
    if into.name != "modelinfos":
        sys.exit("the folder's name must be modelinfos, as vLLM calls it")
    number, others = write(into)
    sys.stdout.write(f"{number} model infos; {len(others)} classes cannot be imported here\n")
