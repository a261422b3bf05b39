# SPDX-License-Identifier: Apache-2.0
"""Over which devices a model is spread, and how often."""
