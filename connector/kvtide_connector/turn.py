"""What the scheduler side knows of one request that carries a directive."""

import enum
from concurrent.futures import Future
from dataclasses import dataclass, field

from kvtide.lease.v1 import directive_pb2
from kvtide.lease.v1 import lease_pb2 as pb


class Load(enum.Enum):
    """Where the one remote load of a request stands; it never goes back."""

    NONE = "none"
    ASKED = "asked"
    READY = "ready"
    LOADING = "loading"
    OVER = "over"


@dataclass
class Turn:
    """State of one leg. Times are nanoseconds of the connector's clock."""

    directive: directive_pb2.TurnDirective
    load: Load = Load.NONE
    reason: str = ""
    """Why less than the lease was reused, for the response; empty when all of it was."""
    ticket_id: str = ""
    answer: "Future[pb.TicketResponse] | None" = None
    asked_at: int = 0
    ticket: pb.TicketResponse | None = None
    verified: int = 0
    """Blocks from the front whose hashes equal those of this prompt."""
    local_blocks: int = 0
    """Blocks that the local prefix cache has already."""
    deadline: int = 0
    """When the load must be over."""
    loaded_tokens: int = 0
    ended: bool = False
    pinned: list[int] = field(default_factory=list)
    """Blocks that the load writes into, kept from reuse until no transfer can write any more."""
