# SPDX-License-Identifier: Apache-2.0
"""What all other rooms are made of: trees and their arrays, rows of a table, checks.

Made of JAX alone. `trees` says what is a leaf, its dtype and path; `forms` what of a
user's tree are arrays; `slices` what `IndexedSlices` are; `shapes` and `signatures`
what annotations and `help` show; `checks` refuses bad input; `programs`
reads what an optimizer's program reads.
"""
