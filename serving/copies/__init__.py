# SPDX-License-Identifier: Apache-2.0
"""Several copies of the model in one container."""
