# SPDX-License-Identifier: Apache-2.0
"""Where a state lives: whose its fields are, and all that follows from that."""
