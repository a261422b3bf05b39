# SPDX-License-Identifier: Apache-2.0
"""The plan: sizes, commands and likely problems, each with its reason."""
