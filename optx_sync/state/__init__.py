# SPDX-License-Identifier: Apache-2.0
"""Whose each field of a state is, and what can be found in one.

Made of `core` and `comm`. A state's class says it (`fields`), each of its arrays is
asked by it (`leaves`), and `held` finds the parameters that belong to a center.
`apply_gradients` and `metrics` stand on these.
"""
