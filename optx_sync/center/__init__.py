# SPDX-License-Identifier: Apache-2.0
"""How parameters of workers meet at a center: center rules.

Made of `exchange` (an agreement and a step on the mean). `worker` is what one worker
does, `round` what happens in a round, `lockstep` when all workers march in step;
`rules/` has the formulas.
"""
