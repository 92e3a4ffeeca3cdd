# SPDX-License-Identifier: Apache-2.0
"""Outer optimizers and schedules of periods and batch sizes that Optax lacks."""
