# SPDX-License-Identifier: Apache-2.0
"""Exchanges that stand up to replicas that are wrong: a broken memory cell, bad data.

The mean follows one replica anywhere. Here no minority can take the result further than
the others reach.
"""
