# SPDX-License-Identifier: Apache-2.0
"""The decorator's place in LMI's package, with what files import for their annotations."""

from handlers.decorators import output_formatter

from .request_io import RequestOutput, TextGenerationOutput

__all__ = ["RequestOutput", "TextGenerationOutput", "output_formatter"]
