# SPDX-License-Identifier: Apache-2.0
"""Options, facts about the machine and the model, and the plan that follows from both. Starts
nothing.
"""
