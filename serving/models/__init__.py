# SPDX-License-Identifier: Apache-2.0
"""Several models in one container, as many at a time as there is memory for."""
