# SPDX-License-Identifier: Apache-2.0
"""The router of a container with several models: the model of each request, and the calls that load
and unload models.
"""
