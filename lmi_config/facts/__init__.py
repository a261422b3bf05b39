# SPDX-License-Identifier: Apache-2.0
"""Facts about the machine, the model, its draft and adapters."""
