# SPDX-License-Identifier: Apache-2.0
"""Decentralised training: workers average with each other, without a center."""

from optx_sync.peers import graphs as graphs
