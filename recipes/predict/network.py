"""The links of a cluster from presets, from the options of the command line, or from a fit."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ...comm import Level, Links, Nccl, Tuned
from ..errors import RecipeError
from .presets import INTER, INTRA, NETWORK_SHARE, Gpu, links_named

#: Links inside a node that are no preset count as NVLink from this rate on, in Gbit/s.
_NVLINK_GBIT = 600.0
_LATENCY_US = {"nvlink": 3.4, "pcie": 5.7, "network": 9.6}


@dataclass(frozen=True)
class Network:
    """The links of a cluster.

    Attributes:
        links: links inside and between nodes, at line rate or as they were fitted.
        nccl: the same as NCCL sees them; None if they were fitted.
        sources: one line for each number, with its source.
    """

    links: Links
    nccl: Nccl | None
    sources: tuple[str, ...]


def find_network(
    preset: Gpu | None,
    named: str | None,
    *,
    inter: tuple[float | None, float | None],
    intra: tuple[float | None, float | None],
    bus_gbytes: float | None,
    oversubscription: float,
    fitted: Path | None,
) -> Network:
    """Collect the links from the options of the command line.

    Args:
        preset: the GPU, whose usual links are the default.
        named: ``INTRA+INTER``, names of link presets.
        inter: microseconds and Gbit/s between nodes, in place of a preset's.
        intra: microseconds and Gbit/s inside a node, in place of a preset's.
        bus_gbytes: measured bus bandwidth between nodes, in 10^9 bytes per second.
        oversubscription: factor by which the network between nodes is oversubscribed.
        fitted: file with the links fitted by ``largebatch comm tune``, in place of all others.

    Raises:
        RecipeError: options are unknown, exclude each other, or are missing.
    """
    if fitted is not None:
        others = (*inter, *intra, named, bus_gbytes)
        if any(value is not None for value in others) or oversubscription != 1:
            raise RecipeError(
                "--fitted: given together with other options on links; valid: without --links and "
                "without latencies and rates"
            )
        try:
            links = Tuned.load(fitted).links
        except ValueError as error:
            raise RecipeError(f"--fitted: {error}") from None
        return Network(links, None, (f"links: fitted by comm tune, {fitted}",))
    names = links_named(named) if named else preset.links if preset else None
    levels, buses, sources = [], [], []
    for where, given, table, index, option in (
        ("inside a node", intra, INTRA, 0, "--intra-"),
        ("between nodes", inter, INTER, 1, "--"),
    ):
        base = table[names[index]] if names else None
        latency_us, gbit = given
        if base is not None:
            latency_us = base.latency_us if latency_us is None else latency_us
            gbit = base.gbit if gbit is None else gbit
        if latency_us is None or gbit is None:
            raise RecipeError(
                f"--links: the links {where} are unknown; valid: --links INTRA+INTER, or "
                f"{option}alpha-us and {option}gbit"
            )
        try:
            levels.append(Level.of(latency_us, gbit))
        except ValueError as error:
            raise RecipeError(f"--links: {error}") from None
        share = base.bus_gbytes / (base.gbit / 8) if base else NETWORK_SHARE
        buses.append(share * gbit / 8)
        measured = f"{buses[-1]:.4g} GB/s bus bandwidth"
        if index == 1 and bus_gbytes is not None:
            buses[1] = bus_gbytes
            measured = f"{bus_gbytes:g} GB/s bus bandwidth (given)"
        elif base is None or index == 1:
            measured += f" ({share:.0%} of it)"
        else:
            measured += " ([S] NCCL's own)"
        latency_source = "given" if given[0] is not None else "[S] NCCL's model"
        rate_source = "given" if given[1] is not None or base is None else base.source
        sources.append(
            f"links {where}: {latency_us:g} us ({latency_source}), {gbit:g} Gbit/s ({rate_source})"
            f", {measured}"
        )
    if oversubscription != 1:
        sources.append(f"network: oversubscribed by {oversubscription:g} (given)")
    fast = names[0].startswith("nvlink") if names else levels[0].gbit >= _NVLINK_GBIT
    try:
        nccl = Nccl(
            buses[0],
            buses[1],
            nvlink=fast,
            nics=INTER[names[1]].nics if names else 1,
            oversubscription=oversubscription,
            tree_gbytes=preset.tree_gbytes if preset else Nccl.tree_gbytes,
            intra_latency=levels[0].latency_us / _LATENCY_US["nvlink" if fast else "pcie"],
            inter_latency=levels[1].latency_us / _LATENCY_US["network"],
        )
    except ValueError as error:
        raise RecipeError(f"--links: {error}") from None
    sources.append(
        f"messages: NCCL's own model of rings and trees [S], {1e6 * nccl.host_seconds:g} us per "
        "call on the host (assumed)"
    )
    return Network(Links(levels[0], levels[1]), nccl, tuple(sources))
