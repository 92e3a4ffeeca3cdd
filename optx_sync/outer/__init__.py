# SPDX-License-Identifier: Apache-2.0
"""What makes a center's step, or says when, where Optax has nothing that does."""
