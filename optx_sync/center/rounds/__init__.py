# SPDX-License-Identifier: Apache-2.0
"""Rounds: when the workers' contributions are summed, and when they land."""
