# SPDX-License-Identifier: Apache-2.0
"""What was asked for: options, declared once, and what is read of them."""
