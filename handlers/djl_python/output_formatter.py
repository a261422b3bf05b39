# SPDX-License-Identifier: Apache-2.0
"""LMI's module for the decorator, with the names that files import for annotations."""

from handlers.decorators import output_formatter

from . import absent
from .request_io import RequestOutput, TextGenerationOutput

__getattr__ = absent.looked_up("output_formatter")
__all__ = ["RequestOutput", "TextGenerationOutput", "output_formatter"]
