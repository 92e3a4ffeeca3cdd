# SPDX-License-Identifier: Apache-2.0
"""A program for one device, run by many workers."""
