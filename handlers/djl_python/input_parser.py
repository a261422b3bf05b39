# SPDX-License-Identifier: Apache-2.0
"""LMI's module of the decorators."""

from handlers.decorators import init_handler, input_formatter, prediction_handler

from . import absent

__getattr__ = absent.looked_up("input_parser")
__all__ = ["init_handler", "input_formatter", "prediction_handler"]

SAGEMAKER_ADAPTER_IDENTIFIER_HEADER = "X-Amzn-SageMaker-Adapter-Identifier"
