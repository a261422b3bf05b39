# SPDX-License-Identifier: Apache-2.0
"""All refusals of vLLM that are known before a start."""

from lmi_config.plan.refusals import models, options
from lmi_config.plan.refusals.given import Given


def faults(given: Given) -> list[str]:
    """A sentence for each, with the option, its value and the fix."""
    return [*dict.fromkeys((*options.faults(given), *models.faults(given)))]
