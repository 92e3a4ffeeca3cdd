# SPDX-License-Identifier: Apache-2.0
"""How a program that is written for one device is run by many workers.

Made of `core`, `comm` and `state`; of the algorithms it asks when they meet. `Workers`
is the front; `mapped` runs one worker's function for all, `layout` says where arrays
lie, `resize` and `joiners` change the number of workers, `checkpoints` and
`fingerprints` say whether arrays are those that were.
"""
