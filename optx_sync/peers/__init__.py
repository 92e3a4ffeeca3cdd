# SPDX-License-Identifier: Apache-2.0
"""Workers with parameters of their own that meet each other, and no center."""

from optx_sync.peers import graphs as graphs
