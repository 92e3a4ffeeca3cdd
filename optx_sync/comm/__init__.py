# SPDX-License-Identifier: Apache-2.0
"""What is sent: collectives, means and sums, varying types, and buffers.

Made of `core`. No other room names a collective of `jax.lax`.
"""
