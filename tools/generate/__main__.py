# SPDX-License-Identifier: Apache-2.0
"""`python -m tools.generate [--check]`: write what this checkout generates, or check
that it is fresh. vllm_options.py, vllm_models.py, vllm_adapters.py and vllm_words.py need vLLM, and
write their files by themselves.
"""

import sys

from tools.generate import helm_values, options_page, protocols
from tools.generate.engine import patches_page, plugin

check = "--check" in sys.argv
written = (options_page, protocols, helm_values, patches_page, plugin)
sys.exit(max(it.main(check=check) for it in written))
