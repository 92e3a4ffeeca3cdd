# SPDX-License-Identifier: Apache-2.0
"""A gradient becomes an update: a catalogue of rules."""
