# SPDX-License-Identifier: Apache-2.0
"""Row-sparse gradients: the rows of a table that a batch touched."""
