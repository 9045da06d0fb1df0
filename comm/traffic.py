"""What an all-reduce sends over each level of link: the common terms of every algorithm's cost."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Traffic:
    """Messages and bytes of one all-reduce, by level of link.

    Attributes:
        intra_messages: transfers inside a node that must follow one another.
        intra_bytes: bytes that one rank sends to ranks of its own node.
        inter_messages: transfers between nodes that must follow one another.
        inter_bytes: bytes that leave one node.

    With a latency and a bandwidth per level these give the time of the latency-bandwidth model,
    ``messages * alpha + bytes * beta`` summed over levels.
    """

    intra_messages: int
    intra_bytes: float
    inter_messages: int
    inter_bytes: float
