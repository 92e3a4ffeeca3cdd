# SPDX-License-Identifier: Apache-2.0
"""Center rules: parameters of workers meet at a center."""
