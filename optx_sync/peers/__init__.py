# SPDX-License-Identifier: Apache-2.0
"""How workers average with each other, without a center: decentralised training.

Made of `exchange` and of `center`, whose rounds it runs with a center on each worker.
"""

from optx_sync.peers import graphs as graphs
