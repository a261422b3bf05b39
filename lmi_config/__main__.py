# SPDX-License-Identifier: Apache-2.0
"""`python -m lmi_config VERB [ARGUMENT ...]`: the verb's help, or a check of its options. It only
needs Python.
"""

import contextlib
import os
import signal
import sys

from lmi_config.options import arguments
from lmi_config.options.settings import SettingsError, read

verb, *rest = sys.argv[1:] or ["serve"]
if arguments.wants_help(rest):
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `--help | head` ends quietly
    print(arguments.usage(verb))
    sys.exit()
try:
    with contextlib.suppress(ModuleNotFoundError):  # the reader of a file is not installed yet
        read(os.environ, arguments.read(verb, rest))
except SettingsError as error:
    print(error, file=sys.stderr)
    sys.exit(2)
