# SPDX-License-Identifier: Apache-2.0
"""The loading of a model's weights."""
