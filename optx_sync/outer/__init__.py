# SPDX-License-Identifier: Apache-2.0
"""Outer optimizers and schedules of the period that Optax does not have."""
