# SPDX-License-Identifier: Apache-2.0
"""All that is known before a start of what vLLM will refuse."""

from lmi_config.plan.refusals import models, options
from lmi_config.plan.refusals.given import Given


def faults(given: Given) -> list[str]:
    """A sentence for each, with the option, its value and the fix."""
    return [*dict.fromkeys((*options.faults(given), *models.faults(given)))]
