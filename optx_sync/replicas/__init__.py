# SPDX-License-Identifier: Apache-2.0
"""How gradients of replicas with equal parameters meet, in every step.

Made of `exchange`: a gradient is reduced, or its pieces, and `inner` steps on the mean.
"""
