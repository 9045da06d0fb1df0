"""Arithmetic of sets of times, each a list of intervals that are disjoint and in order."""

from __future__ import annotations

from collections.abc import Iterable

Interval = tuple[float, float]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the times that are in any of some intervals, which may overlap in any order."""
    found: list[Interval] = []
    for start, end in sorted(intervals):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        elif end > start:
            found.append((start, end))
    return found


def intersection(one: list[Interval], other: list[Interval]) -> list[Interval]:
    """Return the times that are in both of two sets."""
    found: list[Interval] = []
    i = j = 0
    while i < len(one) and j < len(other):
        start, end = max(one[i][0], other[j][0]), min(one[i][1], other[j][1])
        if start < end:
            found.append((start, end))
        if one[i][1] < other[j][1]:
            i += 1
        else:
            j += 1
    return found


def difference(one: list[Interval], other: list[Interval]) -> list[Interval]:
    """Return the times of a set that are not in another."""
    edges = [edge for interval in other for edge in interval]
    bounds = [float("-inf"), *edges, float("inf")]
    gaps = [(a, b) for a, b in zip(bounds[::2], bounds[1::2], strict=True) if a < b]
    return intersection(one, gaps)


def length(intervals: Iterable[Interval]) -> float:
    """Return the total time of a set."""
    return sum(end - start for start, end in intervals)


def in_rows(intervals: list[Interval]) -> list[int]:
    """Return a row for each interval, so that none overlaps another in its row; rows from 0."""
    ends: list[float] = []  # of the last interval in each row
    rows = [0] * len(intervals)
    for index in sorted(range(len(intervals)), key=lambda index: intervals[index]):
        start, end = intervals[index]
        row = next((row for row, last in enumerate(ends) if last <= start), len(ends))
        if row == len(ends):
            ends.append(end)
        ends[row] = end
        rows[index] = row
    return rows
