# SPDX-License-Identifier: Apache-2.0
"""The module that test_warm.py's warm Python imports, and the program that it forks: code to
execute.
"""

import sys
from collections.abc import Sequence

PROGRAM = ["-m", "tests.tools.warm_prepared"]
PROGRAMS = [PROGRAM]


def forked(arguments: Sequence[str]) -> None:
    if arguments[-1:] == ["refuse"]:
        sys.exit(9)


if __name__ == "__main__":
    exec(sys.argv[1])
