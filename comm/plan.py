"""The plan: algorithm and wire dtype by message size, and how gradients are fused into buckets."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from .algorithms import ALGORITHMS, Algorithm, Phased, Torus, TwoLevel
from .topology import Topology

#: Dtypes in which gradients may be sent instead of their own.
WIRE_DTYPES: dict[str, torch.dtype] = {"fp16": torch.float16, "bf16": torch.bfloat16}

#: Dtypes in which half precision may be summed instead of its own.
SUM_DTYPES: dict[str, torch.dtype] = {"fp32": torch.float32}

#: DDP's default bucket size.
DEFAULT_FUSION_THRESHOLD_BYTES = 25 * 1024 * 1024

#: DDP's default size of the first bucket, which is small so that its all-reduce starts early.
_FIRST_BUCKET_BYTES = 1024 * 1024

_VERSION = 1


class PlanError(ValueError):
    """Raised for an invalid plan or rule."""


@dataclass(frozen=True)
class Rule:
    """How to reduce messages of up to ``max_bytes``.

    Attributes:
        algorithm: a key of ``ALGORITHMS``.
        max_bytes: largest message size, in bytes of the gradients' dtype; None for any size.
        wire_dtype: a key of ``WIRE_DTYPES``; None sends the gradients' dtype.
        chunk_bytes: larger messages are split into chunks of about this size, counted in the wire
            dtype, and the phases of consecutive chunks overlap. Only for algorithms with phases:
            ``hierarchical``, ``leader`` and ``torus``. None sends each message whole.
        shape: X and Y of a ``torus``; None makes each node a row.
        sum_dtype: a key of ``SUM_DTYPES``: sum half precision in it, and send half precision all
            the same. Gradients are then divided in the sums, so that none can overflow. Only for
            ``hierarchical`` and ``torus``. None sums as the algorithm's docstring says.

    Raises:
        PlanError: an option is invalid, or options exclude each other.
    """

    algorithm: str
    max_bytes: int | None = None
    wire_dtype: str | None = None
    chunk_bytes: int | None = None
    shape: tuple[int, int] | None = None
    sum_dtype: str | None = None

    def __post_init__(self) -> None:
        # Values from a file may be unhashable, so look them up in lists.
        if self.algorithm not in [*ALGORITHMS]:
            raise PlanError(
                f"algorithm: unknown value {self.algorithm!r}; valid: {', '.join(ALGORITHMS)}"
            )
        for key, dtypes in (("wire_dtype", WIRE_DTYPES), ("sum_dtype", SUM_DTYPES)):
            value = getattr(self, key)
            if value is not None and value not in [*dtypes]:
                raise PlanError(f"{key}: unknown value {value!r}; valid: {', '.join(dtypes)}, null")
        for key in ("max_bytes", "chunk_bytes"):
            value = getattr(self, key)
            if value is not None and not _is_positive(value):
                raise PlanError(
                    f"{key}: {value!r} is not a positive integer; valid: bytes, or null"
                )
        if self.shape is not None:
            if not (_are_positive(self.shape) and len(self.shape) == 2):
                raise PlanError(
                    f"shape: {self.shape!r} is not a grid; valid: [X, Y], two positive integers, "
                    "or null"
                )
            object.__setattr__(self, "shape", tuple(self.shape))
        for key, kind, problem in (
            ("chunk_bytes", Phased, "has no phases to overlap"),
            ("shape", Torus, "has no shape"),
            ("sum_dtype", TwoLevel, "sums where it cannot be chosen"),
        ):
            able = [name for name, one in ALGORITHMS.items() if isinstance(one, kind)]
            if getattr(self, key) is not None and self.algorithm not in able:
                raise PlanError(
                    f"{key}: algorithm {self.algorithm} {problem}; valid with: {', '.join(able)}"
                )

    @property
    def implementation(self) -> Algorithm:
        """The algorithm instance, with the rule's shape and ``sum_dtype``."""
        algorithm = Torus(self.shape) if self.shape else ALGORITHMS[self.algorithm]
        if self.sum_dtype is None:
            return algorithm
        assert isinstance(algorithm, TwoLevel)  # checked above
        return replace(algorithm, fp32_sums=True)

    @property
    def is_plain(self) -> bool:
        """Whether the back end reduces a message in the gradients' own dtype, as DDP does."""
        return self.algorithm == "ring" and self.wire_dtype is None


@dataclass(frozen=True)
class Plan:
    """Rules by message size, and the sizes of the buckets that gradients are fused into.

    Attributes:
        rules: ascending by ``max_bytes``; the last one takes any size.
        fusion_threshold_bytes: approximate bucket size, in bytes. With DDP's default of 25 MiB, the
            first bucket has 1 MiB, as in DDP.
        segments: exact bucket sizes in bytes, in backward order (last layers first), in place of
            ``fusion_threshold_bytes``; further buckets repeat the last size. A bucket is full once
            it reaches its size, so sums over whole layers cut between layers, as those of
            ``fused_bytes`` do.

    Raises:
        PlanError: the rules or sizes are invalid.
    """

    rules: tuple[Rule, ...]
    fusion_threshold_bytes: int = DEFAULT_FUSION_THRESHOLD_BYTES
    segments: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if not self.rules or self.rules[-1].max_bytes is not None:
            raise PlanError("rules: the last rule must take any size; valid: max_bytes null")
        limits = [rule.max_bytes for rule in self.rules[:-1]]
        if None in limits:
            raise PlanError("max_bytes: null in a rule before the last; valid: a positive integer")
        if limits != sorted(set(limits), key=lambda limit: limit or 0):
            raise PlanError(f"max_bytes: {limits} do not ascend; valid: ascending over the rules")
        if not _is_positive(self.fusion_threshold_bytes):
            raise PlanError(
                f"fusion_threshold_bytes: {self.fusion_threshold_bytes!r} is not a positive "
                "integer; valid: bytes"
            )
        if self.segments is not None:
            if not _are_positive(self.segments):
                raise PlanError(
                    f"segments: {self.segments!r} is not a list of sizes; "
                    "valid: positive integers, in bytes, or null"
                )
            object.__setattr__(self, "segments", tuple(self.segments))

    @classmethod
    def single(
        cls,
        algorithm: str = "ring",
        *,
        wire_dtype: str | None = None,
        fusion_threshold_bytes: int = DEFAULT_FUSION_THRESHOLD_BYTES,
    ) -> Plan:
        """Create a plan that uses one algorithm for every size."""
        return cls((Rule(algorithm, None, wire_dtype),), fusion_threshold_bytes)

    @classmethod
    def of(cls, content: Mapping[str, Any]) -> Plan:
        """Create a plan from what ``asdict`` made of one."""
        return cls(**{**content, "rules": tuple(Rule(**rule) for rule in content["rules"])})

    def rule_for(self, size_bytes: int) -> Rule:
        """Return the rule for a message of ``size_bytes`` (in the gradients' dtype)."""
        return next(r for r in self.rules if r.max_bytes is None or size_bytes <= r.max_bytes)

    def check(self, topology: Topology) -> None:
        """Raise TopologyError if an algorithm does not support the layout of the ranks."""
        for rule in self.rules:
            rule.implementation.check(topology)

    def connect(self, topology: Topology) -> None:
        """Create the process groups that the rules need; every rank must call it.

        Raises:
            TopologyError: an algorithm does not support the layout of the ranks.
        """
        self.check(topology)
        for rule in self.rules:
            algorithm = rule.implementation
            if rule.shape:
                topology.grid(rule.shape)
            elif isinstance(algorithm, Phased):
                _ = topology.groups.intra
            else:
                _ = topology.groups.world
            if isinstance(algorithm, Phased) and algorithm.shares(1, topology) is not None:
                _ = topology.groups.memory

    @property
    def bucket_limits(self) -> tuple[int, ...]:
        """The sizes at which buckets are full, in bytes and backward order; the last repeats."""
        if self.segments is not None:
            return self.segments
        if self.fusion_threshold_bytes == DEFAULT_FUSION_THRESHOLD_BYTES:
            return _FIRST_BUCKET_BYTES, DEFAULT_FUSION_THRESHOLD_BYTES
        return (self.fusion_threshold_bytes,)

    @property
    def is_plain(self) -> bool:
        """Whether the back end reduces every message in the gradients' own dtype, as DDP does."""
        return all(rule.is_plain for rule in self.rules)

    def ddp_options(self) -> dict[str, Any]:
        """Return the DDP constructor arguments that give DDP the buckets of this plan.

        There are none if the buckets are DDP's own: ``bucket_cap_mb=25`` would enlarge the first.

        DDP rebuilds its buckets after the first backward in the order in which gradients arrived;
        until then, a cut may be off by some layers. ``torch.compile`` of the DDP model splits its
        graph by ``bucket_cap_mb`` or the largest segment, and needs 1 MiB or more.

        Example::

            model = DistributedDataParallel(model, **plan.ddp_options())
            register(model, plan, topology)
        """
        if self.segments is None:
            is_default = self.fusion_threshold_bytes == DEFAULT_FUSION_THRESHOLD_BYTES
            return {} if is_default else {"bucket_cap_mb": self.fusion_threshold_bytes / 2**20}
        return {"bucket_cap_mb_list": [size / 2**20 for size in self.segments]}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as JSON."""
        content = {"version": _VERSION, **asdict(self)}
        if self.segments is None:
            del content["segments"]
        for rule in content["rules"]:
            for option in ("chunk_bytes", "shape", "sum_dtype"):
                if rule[option] is None:  # most rules have none of them
                    del rule[option]
        Path(path).write_text(json.dumps(content, indent=2) + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Read a plan written by :meth:`save`, or by hand in the same format.

        Raises:
            PlanError: the file cannot be read or is not a valid plan; the message names the file.
        """
        try:
            content = _checked(json.loads(Path(path).read_text()), "plan", ("version",), Plan)
            version = content.pop("version")
            if version != _VERSION:
                raise PlanError(f"version: unknown value {version!r}; valid: {_VERSION}")
            if not isinstance(rules := content["rules"], list):
                raise PlanError(f"rules: {rules!r} is not a list; valid: a list of rules")
            return cls.of(
                {**content, "rules": [_checked(rule, "rule", (), Rule) for rule in rules]}
            )
        except OSError as error:
            raise PlanError(f"plan {path}: {error.strerror}") from error
        except ValueError as error:  # PlanError and JSONDecodeError are ValueErrors
            raise PlanError(f"plan {path}: {error}") from error


def _is_positive(number: Any) -> bool:
    return isinstance(number, int) and not isinstance(number, bool) and number > 0


def _are_positive(numbers: Any) -> bool:
    return isinstance(numbers, (list, tuple)) and bool(numbers) and all(map(_is_positive, numbers))


def _checked(content: Any, what: str, more: tuple[str, ...], kind: type[Any]) -> dict[str, Any]:
    """Return ``content`` if it is an object with the required and no unknown fields of ``kind``."""
    options = fields(kind)
    valid = [*more, *(option.name for option in options)]
    required = [*more, *(option.name for option in options if option.default is MISSING)]
    if not isinstance(content, dict):
        raise PlanError(f"{what}: not an object; valid: an object with keys {', '.join(valid)}")
    for key in content:
        if key not in valid:
            raise PlanError(f"{key}: unknown key in a {what}; valid: {', '.join(valid)}")
    for key in required:
        if key not in content:
            raise PlanError(f"{key}: missing key in a {what}; required: {', '.join(required)}")
    return content
