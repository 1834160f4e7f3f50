"""What differs between the releases of SGLang that the backend serves."""

import re
from importlib.metadata import PackageNotFoundError, version

EVERY_PAGE_SINCE = (0, 5, 21)


def reports_every_page() -> bool:
    """Whether SGLang reports the earlier pages of every batch of a text that it stores.

    Before 0.5.21 it adds a batch to `prefix_keys` only if there were earlier pages already, so each batch of a new text looks like
    its beginning. A source tree that is not installed counts as a recent release.
    """
    try:
        found = re.match(r"(\d+)\.(\d+)\.(\d+)", version("sglang"))
    except PackageNotFoundError:
        return True
    return found is None or tuple(map(int, found.groups())) >= EVERY_PAGE_SINCE
