# SPDX-License-Identifier: Apache-2.0
"""Communication: collectives, means and sums, varying types, and buffers to send."""
