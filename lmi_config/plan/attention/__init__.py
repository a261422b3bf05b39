# SPDX-License-Identifier: Apache-2.0
"""Whether KV cache tiers are right for a model."""
