# SPDX-License-Identifier: Apache-2.0
"""Center rules: what workers and their center exchange, one file a rule."""
