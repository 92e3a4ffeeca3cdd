# SPDX-License-Identifier: Apache-2.0
"""Row-sparse gradients: the rows of a table that a batch touched.

Made of `core` and `comm`; `value_and_grad` gives a replica's own gradients so.
"""
