"""Where the nodes of a graph go on a page: the neighbourhood of the snapshot in layers, from inputs down to outputs."""

from __future__ import annotations

import dataclasses
import importlib
import itertools
from collections.abc import Iterable
from typing import Any

from inductor_passes.inspection.recorded import Change, Graph, Node, Role

LIMIT = 20  # nodes, so that a drawing can be taken in
LETTER, LINE, PADDING = 7.3, 17.0, 10.0  # pixels, of a monospaced font of 12
GAP_ACROSS, GAP_DOWN, MARGIN = 18.0, 38.0, 20.0


@dataclasses.dataclass(frozen=True)
class Box:
    """A node on the page, with its middle at x, y.

    Attributes:
        label, detail: the two lines in it.
        hidden_inputs, hidden_users: how many neighbours are not drawn.
    """

    node: Node
    role: Role
    label: str
    detail: str
    x: float
    y: float
    width: float
    height: float
    hidden_inputs: int
    hidden_users: int


@dataclasses.dataclass(frozen=True)
class Drawing:
    """A graph on the page.

    Attributes:
        paths: the arrows, as SVG path data.
        hidden: how many operations of the graph are not drawn.
    """

    boxes: tuple[Box, ...]
    paths: tuple[str, ...]
    width: float
    height: float
    hidden: int


def draw(change: Change) -> tuple[Drawing, Drawing]:
    """Both graphs, each around what the pass changed, blamed or could have changed.

    Raises:
        ImportError: there is no grandalf, which does the layout.
    """
    report = change.report
    touched = {node.name for rewrite in report.rewrites for node in (rewrite.site, *rewrite.removed, *rewrite.added)}
    blamed = {node.name for decline in report.declines for node in decline.nodes}
    touched |= blamed | {decline.site.name for decline in report.declines}
    added = {node.name for rewrite in report.rewrites for node in rewrite.added}
    pictures: list[_Picture] = []
    for graph in (change.before, change.after):
        roles = {node.name: _role(node, added, blamed) for node in graph.nodes}
        focus = touched | {name for name, role in roles.items() if role in (Role.SNAPSHOT, Role.STATE_PASSING)}
        # What is drawn of the graph before is drawn of the graph after, too.
        pictures.append(_Picture(graph, roles, focus, set(pictures[0].visible) if pictures else set()))
    return pictures[0].drawing(), pictures[1].drawing()


def short(op: str) -> str:
    """An op's name without its namespace and overload."""
    for namespace in ("aten.", "prims.", "mamba_ops.", "higher_order."):
        op = op.removeprefix(namespace)
    return op.split(".")[0].removesuffix("_cpu")


def _role(node: Node, added: set[str], blamed: set[str]) -> Role:
    if node.role is Role.OTHER and node.name in added:
        return Role.ADDED
    if node.role in (Role.OTHER, Role.INPUT) and node.name in blamed:
        return Role.BLAMED
    return node.role


class _Picture:
    """A graph without the nodes that only take one of several results: the arrow goes past them."""

    def __init__(self, graph: Graph, roles: dict[str, Role], focus: set[str], also: set[str]) -> None:
        self.roles = roles
        all_nodes = graph.by_name()
        self.nodes = {name: node for name, node in all_nodes.items() if node.op != "getitem"}
        self.inputs = {
            name: list(dict.fromkeys(_past_getitems(needed, all_nodes) for needed in node.inputs))
            for name, node in self.nodes.items()
        }
        self.users: dict[str, list[str]] = {name: [] for name in self.nodes}
        for name, needed in self.inputs.items():
            for source in needed:
                self.users[source].append(name)
        self.visible = self._visible({_past_getitems(name, all_nodes) for name in focus if name in all_nodes}, also)

    def _visible(self, focus: set[str], also: set[str]) -> list[str]:
        """All nodes of a small graph; of a large one those around the focus, as far as there is room."""
        if not focus or len(self.nodes) <= LIMIT:
            return list(self.nodes)[:LIMIT]
        seen = focus | (also & self.nodes.keys())
        above, below = focus, focus
        for distance in itertools.count():
            above = {needed for name in above for needed in self.inputs[name]} - seen
            # What else uses an input has nothing to do with it.
            below = {user for name in below if self.nodes[name].role is not Role.INPUT for user in self.users[name]}
            near = above | below - seen
            if not near or (distance > 0 and (also or len(seen) + len(near) > LIMIT)):
                return [name for name in self.nodes if name in seen]
            seen |= near
        raise AssertionError("a graph has an end")

    def drawing(self) -> Drawing:
        sizes = {name: self._size(name) for name in self.visible}
        arrows = [(source, name) for name in self.visible for source in self.inputs[name] if source in sizes]
        places, bends, width, height = _lay_out(sizes, arrows)
        boxes = tuple(self._box(name, places[name], sizes[name]) for name in self.visible)
        hidden = sum(self.nodes[name].role is not Role.INPUT for name in self.nodes if name not in sizes)
        return Drawing(boxes, tuple(_path(points) for points in bends), width, height, hidden)

    def _words(self, name: str) -> tuple[str, str]:
        node = self.nodes[name]
        return (node.op if node.role is Role.INPUT else short(node.op)), node.result

    def _size(self, name: str) -> tuple[float, float]:
        return max(map(len, self._words(name))) * LETTER + 2 * PADDING, 2 * LINE + PADDING

    def _box(self, name: str, place: tuple[float, float], size: tuple[float, float]) -> Box:
        inputs, users = (
            sum(other not in self.visible for other in others[name]) for others in (self.inputs, self.users)
        )
        return Box(self.nodes[name], self.roles[name], *self._words(name), *place, *size, inputs, users)


def _past_getitems(name: str, nodes: dict[str, Node]) -> str:
    while nodes[name].op == "getitem":
        name = nodes[name].inputs[0]
    return name


Point = tuple[float, float]


def _lay_out(
    sizes: dict[str, tuple[float, float]], arrows: list[tuple[str, str]]
) -> tuple[dict[str, Point], list[list[Point]], float, float]:
    """Middles of the nodes, corners of the arrows, and the size of it all."""
    graphs: Any = importlib.import_module("grandalf.graphs")
    layouts: Any = importlib.import_module("grandalf.layouts")
    vertices = {name: graphs.Vertex(name) for name in sizes}
    for name, (width, height) in sizes.items():
        vertices[name].view = layouts.VertexViewer(width, height)
    # Upside down, so that an input is put close to what needs it and not into the first layer.
    edges = [graphs.Edge(vertices[target], vertices[source]) for source, target in arrows]
    for edge in edges:
        edge.view = _Corners()
    places: dict[str, Point] = {}
    corners: dict[Any, list[Point]] = {}
    left, height = MARGIN, 0.0
    for component in graphs.Graph(vertices.values(), edges).C:
        layout = layouts.SugiyamaLayout(component)
        layout.xspace, layout.yspace = GAP_ACROSS, GAP_DOWN
        layout.init_all(optimize=True)
        layout.draw(4)
        views = [vertex.view for vertex in component.sV]
        x0 = min(view.xy[0] - view.w / 2 for view in views) - left
        y0 = max(view.xy[1] + view.h / 2 for view in views) + MARGIN
        for vertex in component.sV:
            places[vertex.data] = (vertex.view.xy[0] - x0, y0 - vertex.view.xy[1])
        for edge in component.sE:
            corners[edge] = [(x - x0, y0 - y) for x, y in reversed(edge.view.points)]
        left = max(view.xy[0] + view.w / 2 for view in views) - x0 + 2 * GAP_ACROSS
        height = max(height, y0 - min(view.xy[1] - view.h / 2 for view in views) + MARGIN)
    for (source, target), edge in zip(arrows, edges, strict=True):
        down, up = sizes[source][1] / 2, sizes[target][1] / 2
        (x_from, y_from), (x_to, y_to) = places[source], places[target]
        corners[edge] = [(x_from, y_from + down), *corners.get(edge, [])[1:-1], (x_to, y_to - up)]
    return places, [corners[edge] for edge in edges], max(left - 2 * GAP_ACROSS + MARGIN, 2 * MARGIN), height


class _Corners:
    """What grandalf asks of the picture of an edge."""

    def __init__(self) -> None:
        self.points: list[Point] = []

    def setpath(self, points: Iterable[Point]) -> None:
        self.points = list(points)


def _path(points: list[Point]) -> str:
    """A curve through these points that leaves and meets each of them vertically."""
    (x0, y0), *others = points
    path = f"M{x0:.0f} {y0:.0f}"
    for x1, y1 in others:
        middle = (y0 + y1) / 2
        path += f"C{x0:.0f} {middle:.0f} {x1:.0f} {middle:.0f} {x1:.0f} {y1:.0f}"
        x0, y0 = x1, y1
    return path
