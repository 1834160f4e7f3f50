"""The interface by which a store shows the tokens of some rows to the attention loop."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from calib.runtime.attend.attention_stats import Observed
from calib.runtime.attend.fetched_tokens import FetchedTokens
from calib.runtime.attend.grouped_query import GroupedQuery
from calib.runtime.attend.read_plan import ReadPlan
from calib.runtime.attend.request import AttendRequest
from calib.runtime.attend.scored_span import ExactSpan, ScoredSpan
from calib.runtime.logits import Logits
from calib.runtime.paging.forward import Forward


@dataclass
class LayerTokens(ABC):
    """The tokens that the rows of a `request` hold, by their sequence `state`; `fetched` tokens replace packed ones."""

    state: Any
    request: AttendRequest
    forward: Forward = field(init=False)
    rows: range = field(init=False)
    logits: Logits = field(init=False)
    fetched: FetchedTokens | None = field(init=False)

    def __post_init__(self) -> None:
        asked = self.request
        self.forward, self.rows, self.logits, self.fetched = asked.forward, asked.rows, asked.logits, asked.fetched

    @abstractmethod
    def plan(self, queries: range, query_rows: int) -> ReadPlan:
        """The read plan of the query columns `queries`, which are `query_rows` rows of a KV head."""

    @abstractmethod
    def spans(
        self, query: GroupedQuery, plan: ReadPlan, new_keys: Tensor, new_values: Tensor, observed: Observed | None
    ) -> Iterator[ScoredSpan | ExactSpan]:
        """All tokens that `query` attends, as spans; `observed` ones are marked as watched. An `ExactSpan`, if any, comes last."""

    def columns_at_once(self, heads: int, columns: int) -> int:
        """How many query columns of `heads` heads are scored at once, at most `columns`."""
        return columns

    @property
    def asks(self) -> bool:
        """Whether the attention mass of each token is requested."""
        return self.fetched is not None and self.fetched.asks
