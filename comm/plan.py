"""The plan: which algorithm and wire dtype for how many bytes, and how gradients are fused."""

from __future__ import annotations

import inspect
import json
import os
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from .algorithms import ALGORITHMS, Algorithm, Phased, Torus
from .topology import Topology

#: What may go over the wire in place of the gradients' own dtype.
WIRE_DTYPES: dict[str, torch.dtype] = {"fp16": torch.float16, "bf16": torch.bfloat16}

#: DDP's own default bucket size.
DEFAULT_FUSION_THRESHOLD_BYTES = 25 * 1024 * 1024

_VERSION = 1


class PlanError(ValueError):
    """A plan that is not one."""


@dataclass(frozen=True)
class Rule:
    """What to do with a message of up to ``max_bytes``.

    Attributes:
        algorithm: a key of ``ALGORITHMS``.
        max_bytes: counted in the gradients' dtype; None for any size.
        wire_dtype: a key of ``WIRE_DTYPES``; None sends the gradients' dtype.
        chunk_bytes: larger messages are cut into chunks of about this size, counted as sent, and
            the phases of consecutive chunks overlap. Only for algorithms in phases:
            ``hierarchical``, ``leader`` and ``torus``. None sends each message whole.
        shape: X and Y of a ``torus``; None takes nodes as rows.

    Raises:
        PlanError: options that do not exist or do not go together.
    """

    algorithm: str
    max_bytes: int | None = None
    wire_dtype: str | None = None
    chunk_bytes: int | None = None
    shape: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        # Compared with lists: what a file holds may not be hashable.
        if self.algorithm not in [*ALGORITHMS]:
            raise PlanError(f"algorithm {self.algorithm!r} is not one of {', '.join(ALGORITHMS)}")
        if self.max_bytes is not None and not _is_positive(self.max_bytes):
            raise PlanError(f"max_bytes must be a positive whole number, not {self.max_bytes!r}")
        if self.wire_dtype is not None and self.wire_dtype not in [*WIRE_DTYPES]:
            raise PlanError(
                f"wire_dtype {self.wire_dtype!r} is not one of {', '.join(WIRE_DTYPES)}, null"
            )
        if self.chunk_bytes is not None:
            if not _is_positive(self.chunk_bytes):
                raise PlanError(
                    f"chunk_bytes must be a positive whole number or null, not {self.chunk_bytes!r}"
                )
            phased = [name for name, one in ALGORITHMS.items() if isinstance(one, Phased)]
            if self.algorithm not in phased:
                raise PlanError(
                    f"chunk_bytes does not go with algorithm {self.algorithm}, which has no "
                    f"phases that could overlap; valid: {', '.join(phased)}"
                )
        if self.shape is not None:
            sides = self.shape if isinstance(self.shape, (list, tuple)) else ()
            if len(sides) != 2 or not all(_is_positive(side) for side in sides):
                raise PlanError(
                    f"shape must be [X, Y], two positive whole numbers, or null, not {self.shape!r}"
                )
            if self.algorithm != "torus":
                raise PlanError(f"shape goes with algorithm torus, not {self.algorithm}")
            object.__setattr__(self, "shape", tuple(sides))

    @property
    def implementation(self) -> Algorithm:
        """The algorithm, in the shape asked for."""
        return Torus(self.shape) if self.shape else ALGORITHMS[self.algorithm]


@dataclass(frozen=True)
class Plan:
    """Rules in order of size, and the fusion threshold.

    Attributes:
        rules: ascending by ``max_bytes``; the last one takes any size.
        fusion_threshold_bytes: gradients are fused into buckets of about this size.
        segments: in place of that, the size of each bucket in the order of backward, that of the
            last layers first; what is left over goes into further ones of the last size. A bucket
            is full when it has reached its size, so the sizes of whole layers cut between them:
            ``segments_between`` and ``fused_bytes`` give such sizes.

    Raises:
        PlanError: rules that are not of this form.
    """

    rules: tuple[Rule, ...]
    fusion_threshold_bytes: int = DEFAULT_FUSION_THRESHOLD_BYTES
    segments: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if not self.rules or self.rules[-1].max_bytes is not None:
            raise PlanError("the last rule of a plan must take any size: max_bytes null")
        limits = [rule.max_bytes for rule in self.rules[:-1]]
        if None in limits:
            raise PlanError("every rule but the last needs max_bytes, a positive whole number")
        if limits != sorted(set(limits), key=lambda limit: limit or 0):
            raise PlanError(f"max_bytes must ascend from rule to rule, not {limits}")
        if not _is_positive(self.fusion_threshold_bytes):
            raise PlanError(
                "fusion_threshold_bytes must be a positive whole number, "
                f"not {self.fusion_threshold_bytes!r}"
            )

        if self.segments is not None:
            sizes = self.segments if isinstance(self.segments, (list, tuple)) else ()
            if not sizes or not all(_is_positive(size) for size in sizes):
                raise PlanError(
                    "segments must be a list of positive whole numbers, or null, "
                    f"not {self.segments!r}"
                )
            object.__setattr__(self, "segments", tuple(sizes))

    @classmethod
    def single(
        cls,
        algorithm: str = "ring",
        *,
        wire_dtype: str | None = None,
        fusion_threshold_bytes: int = DEFAULT_FUSION_THRESHOLD_BYTES,
    ) -> Plan:
        """One algorithm for every size."""
        return cls((Rule(algorithm, None, wire_dtype),), fusion_threshold_bytes)

    def rule_for(self, size_bytes: int) -> Rule:
        """The rule for a message of ``size_bytes``."""
        return next(r for r in self.rules if r.max_bytes is None or size_bytes <= r.max_bytes)

    def check(self, topology: Topology) -> None:
        """Raise TopologyError if an algorithm does not go with the layout of the ranks."""
        for rule in self.rules:
            rule.implementation.check(topology)

    def connect(self, topology: Topology) -> None:
        """Make the process groups that the rules need; every rank must call it.

        Raises:
            TopologyError: an algorithm does not go with the layout of the ranks.
        """
        self.check(topology)
        _ = topology.groups
        for rule in self.rules:
            if rule.shape:
                topology.grid(rule.shape)

    @property
    def bucket_cap_mb(self) -> float:
        """The fusion threshold as DDP's ``bucket_cap_mb``, in MiB."""
        return self.fusion_threshold_bytes / 2**20

    def ddp_options(self) -> dict[str, Any]:
        """What DDP has to be built with for its buckets to be those of the plan.

        DDP lays out its buckets anew after the first backward, in the order in which gradients
        came; until then, a cut may be off by some layers. ``torch.compile`` of the DDP model cuts
        its graph by ``bucket_cap_mb`` or the largest segment, and takes 1 MiB or more only.

        Raises:
            PlanError: the plan has segments, and this torch cannot set the size of each bucket.

        Example::

            model = DistributedDataParallel(model, **plan.ddp_options())
            register(model, plan, topology)
        """
        if self.segments is None:
            return {"bucket_cap_mb": self.bucket_cap_mb}
        if "bucket_cap_mb_list" not in inspect.signature(DistributedDataParallel).parameters:
            raise PlanError(
                f"segments need a torch whose DistributedDataParallel takes bucket_cap_mb_list, "
                f"as 2.11 and 2.15 do; this is {torch.__version__}"
            )
        return {"bucket_cap_mb_list": [size / 2**20 for size in self.segments]}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it as JSON."""
        content = {"version": _VERSION, **asdict(self)}
        if self.segments is None:
            del content["segments"]
        for rule in content["rules"]:
            for option in ("chunk_bytes", "shape"):
                if rule[option] is None:  # most rules have neither
                    del rule[option]
        Path(path).write_text(json.dumps(content, indent=2) + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Read what :meth:`save` wrote, or what was written by hand in the same form.

        Raises:
            PlanError: the file cannot be read, or is not a plan; the message names the file.
        """
        try:
            content = _object(json.loads(Path(path).read_text()), "plan", ("version",), Plan)
            if content.pop("version") != _VERSION:
                raise PlanError(f"version must be {_VERSION}")
            rules = content.pop("rules")
            if not isinstance(rules, list):
                raise PlanError("rules must be a list")
            return cls(tuple(Rule(**_object(rule, "rule", (), Rule)) for rule in rules), **content)
        except OSError as error:
            raise PlanError(f"plan {path}: {error.strerror}") from error
        except ValueError as error:  # PlanError and JSONDecodeError are of this kind
            raise PlanError(f"plan {path}: {error}") from error


def _is_positive(number: Any) -> bool:
    return isinstance(number, int) and not isinstance(number, bool) and number > 0


def _object(content: Any, what: str, more: tuple[str, ...], kind: type[Any]) -> dict[str, Any]:
    """``content`` as an object with the fields of ``kind``, those without default included."""
    options = fields(kind)
    valid = [*more, *(option.name for option in options)]
    required = [*more, *(option.name for option in options if option.default is MISSING)]
    if not isinstance(content, dict):
        raise PlanError(f"a {what} must be an object with the keys {', '.join(valid)}")
    for key in content:
        if key not in valid:
            raise PlanError(f"unknown key {key!r} of a {what}; valid: {', '.join(valid)}")
    for key in required:
        if key not in content:
            raise PlanError(f"the key {key!r} of a {what} is missing")
    return content
