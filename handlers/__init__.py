# SPDX-License-Identifier: Apache-2.0
"""Wire formats: what clients send and get, and the OpenAI-shaped calls that the engine answers."""
