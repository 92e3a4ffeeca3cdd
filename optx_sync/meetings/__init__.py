# SPDX-License-Identifier: Apache-2.0
"""What becomes of contributions that come one by one: coded, weighed, when merged.

Simulation and runtime are made of it; lockstep, where all come at once, needs none.
"""
