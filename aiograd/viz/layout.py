"""Where boxes go: rows by depth, lanes by worker, few crossings. Numbers in, numbers out.

1. Rows follow the longest paths, so data always flows downwards; side branches hang low.
2. An edge over several rows is bent around boxes through invisible points, one per row in between.
3. The order within a row follows the average place of the neighbours, swept down and up.
4. Places are moved as near to the neighbours as the order and the widths allow.

This is the layered drawing of Sugiyama, Tagawa and Toda, with lanes as a further constraint.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

Key = Hashable
GAP = 26.0  # free space between two boxes of a row
THIN = 14.0  # width of the point where an edge passes a row
SWEEPS = 8  # the order settles well before that


@dataclass
class Layout:
    """Centres of boxes, rows of boxes, and the points each edge runs through."""

    x: dict[Key, float] = field(default_factory=dict)
    row: dict[Key, int] = field(default_factory=dict)
    lanes: list[tuple[float, float]] = field(default_factory=list)  # left and right of each
    paths: list[list[Key]] = field(default_factory=list)  # per edge: ends and bends


def arrange(
    widths: Mapping[Key, float],
    edges: Sequence[tuple[Key, Key]],
    lane_of: Mapping[Key, int],
    lanes: int = 1,
) -> Layout:
    """Place boxes of the given widths; keys keep their order where nothing else decides."""
    layout = Layout(row=rows(list(widths), edges))
    size, lane = dict(widths), dict(lane_of)
    links: list[tuple[Key, Key]] = []
    for number, (source, target) in enumerate(edges):
        path: list[Key] = [source]
        for row in range(layout.row[source] + 1, layout.row[target]):
            # The bends of one edge stay in the lane it comes from, and take part in ordering and
            # placing like boxes.
            bend = ("bend", number, row)
            layout.row[bend], size[bend], lane[bend] = row, THIN, lane[source]
            path.append(bend)
        path.append(target)
        layout.paths.append(path)
        links += pairwise(path)
    grid = _ordered(layout.row, links, lane)
    _place(layout, grid, links, size, lane, lanes)
    return layout


def rows(keys: Sequence[Key], edges: Sequence[tuple[Key, Key]]) -> dict[Key, int]:
    """Rows in which every edge goes down by at least one; circles are left as they are."""
    row = dict.fromkeys(keys, 0)
    waiting = dict.fromkeys(keys, 0)
    after: dict[Key, list[Key]] = {key: [] for key in keys}
    for source, target in edges:
        waiting[target] += 1
        after[source].append(target)
    # Nodes in a circle never become ready; they stay in the first row, and the picture is drawn.
    ready = [key for key in keys if not waiting[key]]
    order: list[Key] = []
    while ready:
        key = ready.pop()
        order.append(key)
        for other in after[key]:
            row[other] = max(row[other], row[key] + 1)
            waiting[other] -= 1
            if not waiting[other]:
                ready.append(other)
    for key in reversed(order):
        if after[key]:
            # Side branches join from right above, not from the very top.
            row[key] = max(row[key], min(row[other] for other in after[key]) - 1)
    return row


def _ordered(
    row: Mapping[Key, int], links: Sequence[tuple[Key, Key]], lane: Mapping[Key, int]
) -> list[list[Key]]:
    """Return the rows, each in an order with few crossings."""
    grid: list[list[Key]] = [[] for _ in range(max(row.values(), default=-1) + 1)]
    for key, number in row.items():
        grid[number].append(key)
    above, below = _neighbours(links)
    for line in grid:
        line.sort(key=lambda key: lane[key])
    for sweep in range(SWEEPS):
        down = sweep % 2 == 0
        place = {key: i for line in grid for i, key in enumerate(line)}
        # Down by the neighbours above, then up by those below, until the crossings settle.
        for line in grid if down else reversed(grid):
            near = above if down else below
            mean = {key: _mean([place[n] for n in near.get(key, ())], place[key]) for key in line}
            # The lane comes first: boxes of two workers never mix. The sort is stable, so ties keep
            # their order.
            line.sort(key=lambda key: (lane[key], mean[key]))
            place.update({key: i for i, key in enumerate(line)})
    return grid


def _neighbours(
    links: Sequence[tuple[Key, Key]],
) -> tuple[dict[Key, list[Key]], dict[Key, list[Key]]]:
    """Return for each key those linked to it from above, and from below."""
    above: dict[Key, list[Key]] = {}
    below: dict[Key, list[Key]] = {}
    for source, target in links:
        above.setdefault(target, []).append(source)
        below.setdefault(source, []).append(target)
    return above, below


def _mean(values: Sequence[float], otherwise: float) -> float:
    return sum(values) / len(values) if values else otherwise


def _place(
    layout: Layout,
    grid: list[list[Key]],
    links: Sequence[tuple[Key, Key]],
    size: Mapping[Key, float],
    lane: Mapping[Key, int],
    lanes: int,
) -> None:
    """Give every lane its own run of x, then put the lanes side by side."""
    left = 0.0
    for number in range(lanes):
        own = [[key for key in line if lane[key] == number] for line in grid]
        # Lanes are placed one by one, so edges between two of them have no say.
        inner = [(a, b) for a, b in links if lane[a] == lane[b] == number]
        x = _settle(own, inner, size)
        low = min((x[key] - size[key] / 2 for key in x), default=0.0)
        # A lane without boxes still has room for its name.
        high = max((x[key] + size[key] / 2 for key in x), default=80.0)
        layout.x.update({key: place - low + left + GAP for key, place in x.items()})
        right = left + high - low + 2 * GAP
        layout.lanes.append((left, right))
        left = right


def _settle(
    grid: list[list[Key]], links: Sequence[tuple[Key, Key]], size: Mapping[Key, float]
) -> dict[Key, float]:
    """Return the x of every key of a lane: near its neighbours, order and distances kept."""
    above, below = _neighbours(links)
    x: dict[Key, float] = {}
    for line in grid:
        offsets = _offsets(line, size)
        middle = (offsets[-1] if offsets else 0.0) / 2
        # Every row begins centred, so that a chain is straight from the start.
        x.update({key: offset - middle for key, offset in zip(line, offsets, strict=True)})
    # Positions move by averages and need more rounds to come to rest than the order does.
    for sweep in range(3 * SWEEPS):
        down = sweep % 2 == 0
        for line in grid if down else reversed(grid):
            near = above if down else below
            wish = [_mean([x[n] for n in near.get(key, ())], x[key]) for key in line]
            x.update(zip(line, _nearest(wish, _offsets(line, size)), strict=True))
    return x


def _offsets(line: Sequence[Key], size: Mapping[Key, float]) -> list[float]:
    """Centres of the boxes of a row when they stand as close as they may."""
    offsets, at = [], 0.0
    for i, key in enumerate(line):
        at += (size[line[i - 1]] + size[key]) / 2 + GAP if i else 0.0
        offsets.append(at)
    return offsets


def _nearest(wish: Sequence[float], offsets: Sequence[float]) -> list[float]:
    """Places as near to the wishes as possible (in squares) that keep order and distances.

    Taking the least distances away leaves the one condition that places do not fall, which pooling
    neighbours that collide solves exactly.
    """
    pools: list[tuple[float, int]] = []  # mean, and how many places share it
    for want, offset in zip(wish, offsets, strict=True):
        mean, count = want - offset, 1
        while pools and pools[-1][0] > mean:
            other, number = pools.pop()
            mean = (mean * count + other * number) / (count + number)
            count += number
        pools.append((mean, count))
    flat = [mean for mean, count in pools for _ in range(count)]
    return [mean + offset for mean, offset in zip(flat, offsets, strict=True)]
