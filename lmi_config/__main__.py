"""`python -m lmi_config`: check the options in the environment, with nothing installed."""

import os
import sys

from lmi_config.settings import SettingsError, read

try:
    read(os.environ)
except SettingsError as error:
    print(error, file=sys.stderr)
    sys.exit(2)
