# SPDX-License-Identifier: Apache-2.0
"""Byzantine-robust aggregation: exchanges that stand up to wrong numbers.

The mean follows one replica anywhere. Here no minority can take the result further than
the others reach.
"""
