# SPDX-License-Identifier: Apache-2.0
"""What the operator asked for, what the machine has, and what follows from both. Starts nothing."""
