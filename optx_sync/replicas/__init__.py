# SPDX-License-Identifier: Apache-2.0
"""Replicas with equal parameters: their gradients are reduced in every step."""
