# SPDX-License-Identifier: Apache-2.0
"""The options: their declarations, and the readers of their values."""
