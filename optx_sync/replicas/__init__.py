# SPDX-License-Identifier: Apache-2.0
"""Where gradients of replicas meet: copies with equal parameters, one update."""
