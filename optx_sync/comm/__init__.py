# SPDX-License-Identifier: Apache-2.0
"""What is sent: collectives, sums and means, JAX's types of it, and buffers."""
