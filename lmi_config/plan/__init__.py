# SPDX-License-Identifier: Apache-2.0
"""What follows from both: sizes, commands, what is likely to go wrong, each with its reason."""
