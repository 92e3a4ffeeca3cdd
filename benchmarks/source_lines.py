"""Lines of Python's standard library as sparse data of two classes.

Comes with every Python, and differs between its versions. A line's tokens and pairs of
neighbouring tokens are hashed into features, of which most are seen in very few lines.
"""

import hashlib
import platform
import re
import sysconfig
import zlib
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

FEATURES = 2**18
WIDTH = 48  # features of a line; 2 % of the lines have more


def load(counts: tuple[int, ...]) -> tuple[list[Any], str]:
    """Hashed features and labels of as many lines as each count says; what they are."""
    root, lines, labels = Path(sysconfig.get_path("stdlib")), [], []
    digest, files = hashlib.sha256(), 0
    for path in sorted(root.rglob("*.py")):
        folders = path.relative_to(root).parts[:-1]
        if "site-packages" not in folders:
            text = path.read_text("utf-8", "replace")
            digest.update(text.encode())
            files += 1
            lines += (new := text.splitlines())
            labels += [(folders[:1] == ("test",), bool(folders))] * len(new)
    # An id out of range is no feature: in compiled code it gives 0 and learns nothing.
    ids, kept = np.full((sum(counts), WIDTH), FEATURES, np.int32), []
    for index in np.random.default_rng(0).permutation(len(lines)):
        tokens = re.findall(r"\w+|[^\w\s]", lines[index])
        if len(tokens) >= 3 and len(kept) < len(ids):
            tokens += [" ".join(pair) for pair in pairwise(tokens)]
            found = {zlib.crc32(token.encode()) % FEATURES for token in tokens}
            ids[len(kept), : len(found)] = sorted(found)[:WIDTH]
            kept.append(index)
    # Some interpreters come without tests: then the question is for packages.
    tests, packages = np.array(labels, np.float32)[kept].T
    label = tests if tests.any() else packages
    about = (
        f"Python {platform.python_version()}: {files:,} files, {len(lines):,} lines, "
        f"sha256 of their text {digest.hexdigest()}; of the {counts[0]:,} lines to "
        f"train {label[: counts[0]].mean():.1%} are positive, with "
        f"{np.unique(ids[: counts[0]]).size - 1:,} different features."
    )
    cuts = np.cumsum(counts)[:-1]
    return list(zip(np.split(ids, cuts), np.split(label, cuts), strict=True)), about
