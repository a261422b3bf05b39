# SPDX-License-Identifier: Apache-2.0
"""Whether KV cache tiers are correct for a model."""
