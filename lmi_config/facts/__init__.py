# SPDX-License-Identifier: Apache-2.0
"""What there is: the machine, the model, its draft, adapters."""
