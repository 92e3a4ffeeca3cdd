# SPDX-License-Identifier: Apache-2.0
"""Rounds: when what workers contribute is summed, and when it lands."""
