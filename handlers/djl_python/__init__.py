# SPDX-License-Identifier: Apache-2.0
"""The names that users' model.py files import from LMI's package `djl_python`.

They find it under that name, in a separate process. Names and signatures are LMI's, as far as a
file written for LMI's vLLM path uses them. Large modules are only imported when they are needed.
"""

import importlib
import sys

from . import absent
from .inputs import Input
from .outputs import Output
from .pair_list import PairList

__all__ = ["Input", "Output", "PairList"]
__version__ = "0.36.0"  # of the package that this one replaces

# With an alias only for the package, Python would load its modules twice, as djl_python.outputs and
# handlers.djl_python.outputs, and an Output of the one would not be an Output of the other.
for _name in (
    "async_utils",
    "encode_decode",
    "input_parser",
    "inputs",
    "np_util",
    "output_formatter",
    "outputs",
    "pair_list",
    "request_io",
    "response",
    "streaming_utils",
):
    sys.modules.setdefault(f"djl_python.{_name}", importlib.import_module(f".{_name}", __name__))
absent.explain()
__getattr__ = absent.looked_up("")
