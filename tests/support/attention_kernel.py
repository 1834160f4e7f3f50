"""Which kernel attends to the pages of a case, once tokens have left its window."""

from cases import Case

from calib.runtime.methods import method_class, packs_of
from calib.runtime.stages.contract import Codec

# None does if all tokens are in host memory, or others are attended than are stored (WITHOUT), or if no token has left the window
# after a prompt of about a hundred tokens, so that there are no pages (UNPACKED).
WITHOUT = ["oracle", "offload"]
UNPACKED = ["kivi-8", "kivi-4", "kivi-2", "kivi-4-calibrated"]
# Read tile by tile in torch: ordered stores with corrections, CSR with corrections or with offline atoms alone, and ZipCache's
# keys before RoPE.
IN_TILES = [
    "kivi-corrected",
    "rtn-twice",
    "csr-corrected",
    "csr-offline",
    "zipcache-before-rope",
    "zipcache-before-frozen",
]


def which(case: Case) -> str | None:
    """The operation that attends to a case's pages, or None."""
    unserved = any(codec.has_kernel is Codec.has_kernel for codec in packs_of(method_class(case.method)))
    if unserved or case.name in [*WITHOUT, *UNPACKED, *IN_TILES]:
        return None
    return "desparsify_attend" if case.method == "csr" else "attend"
