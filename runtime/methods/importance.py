"""The policy by which tokens are important, which MiKV leaves open (arXiv:2402.18096, section 2.1 and figure 4)."""

from collections.abc import Sequence
from typing import Any

from calib.runtime.messages.printable import printable
from calib.runtime.methods.contract import check_choice, check_share
from calib.runtime.stages.saliency import Accumulated, FastGen, Normalised, Probes
from calib.runtime.stages.selection import Saliency

POLICIES = ("accumulated", "normalised", "local", "fastgen")


def importance(
    policy: str, probes: str | None, probe_share: float, special_ids: Sequence[int], recovery: float
) -> tuple[Saliency | None, Probes | None]:
    """Returns the saliency that scores tokens (None: nothing is scored) and the prompt's rows whose attention counts (None: all).

    With `probes` None the rows are those of the policy's paper: all for "accumulated", which is H2O's (arXiv:2306.14048);
    `probe_share` of them, half drawn and half the newest, for "normalised", which is ZipCache's (arXiv:2405.14256), and likewise
    for "fastgen", whose profile is a mean over rows. Raises ValueError for options that do not go together.
    """
    check_choice("policy", policy, POLICIES)
    check_share("recovery", recovery)
    strategy = probes if probes is not None else "all" if policy == "accumulated" else "random+recent"
    asked: Any = tuple(special_ids) if isinstance(special_ids, list) else special_ids
    # Special ids may be for the policy, for the probes or for both; `Probes` checks them in each case.
    by_id = asked if strategy == "special" or policy != "fastgen" else ()
    chosen = Probes(strategy, probe_share, by_id)
    ids = Probes("special", probe_share, asked).special_ids if asked != by_id else asked
    if policy == "local":
        if probes is not None:
            raise ValueError(f"probes={printable(probes)} with policy='local', which scores no token; leave it out")
        return None, None
    saliency: Saliency = {"accumulated": Accumulated(), "normalised": Normalised()}.get(policy) or FastGen(
        recovery, ids
    )
    return saliency, None if strategy == "all" else chosen
