# SPDX-License-Identifier: Apache-2.0
"""Where a state lives: whose each field is, and all that follows from it."""
