# SPDX-License-Identifier: Apache-2.0
"""Where parameters of workers meet: copies of their own, and a center between them."""
