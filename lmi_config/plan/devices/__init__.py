# SPDX-License-Identifier: Apache-2.0
"""The devices of a model, and its copies."""
