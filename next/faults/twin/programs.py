"""Generated programs: plain data, made by Hypothesis, and what is known of them beforehand.

A program is a dictionary: ``main`` and ``children`` are blocks (lists of nodes), ``input`` is the
kind of value that ``main`` is called with, ``stops`` says how its second run is disturbed. A node
is a dictionary with ``op``; ``Run`` has a method for each. Each branch of a program has one
variable, the last value it saw, which steps and children are called with and which ``if`` and
``loop`` depend on.

Waits are either short, or so long that they clearly do not end (``stuck``), so that it is certain
what a timeout, a race or a failing group comes to, unless the program is ``ordered``: what it does
depends on the order in which concurrent steps are completed.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from hypothesis import HealthCheck, Phase, assume, given, seed, settings
from hypothesis import strategies as st

from faults.twin.values import KINDS, RAISED

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hypothesis.strategies import DrawFn as Draw

Node = dict[str, Any]
Block = list[Node]

_DEPTH = 3
#: A program with more nodes takes too long, one with fewer says little.
_FEWEST_NODES, _MOST_NODES = 4, 40
_CHILDREN = 2
SIGNALS = ("SIGKILL", "SIGKILL", "SIGTERM", "SIGINT")
#: Longer than the timeouts that fire.
PAUSE = 0.2


# --- generating -----------------------------------------------------------------------------------


def generate(count: int, start: int) -> list[Node]:
    """Return that many programs, the same ones for the same start.

    Each has a seed of its own: one example of Hypothesis resembles the one before it.
    """
    return [_generate_one(start * 100_000 + number) for number in range(count)]


def _generate_one(start: int) -> Node:
    found: list[Node] = []

    @settings(
        max_examples=2,  # the first one is always the simplest
        phases=[Phase.generate],
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @seed(start)
    @given(programs())
    def collect(spec: Node) -> None:
        found.append(spec)

    collect()
    return found[-1]


def select(specs: list[Node], count: int) -> list[Node]:
    """Return some of these programs, which together have as many kinds of nodes as possible."""
    left, met = list(specs), set[str]()
    chosen: list[Node] = []
    while left and len(chosen) < count:
        best = max(left, key=lambda spec: len(ops(spec) - met) / (4 + size(spec)))
        met |= ops(best)
        chosen.append(best)
        left.remove(best)
    return chosen


@st.composite
def programs(draw: Draw) -> Node:
    """Return a whole program."""
    spec = {
        "main": _cancelled(draw)
        if draw(st.sampled_from(range(8))) == 7
        else _block(draw, _DEPTH, 0),
        "children": [_block(draw, 2, 1), _block(draw, 2, None)],
        "input": draw(_KINDS),
        "seed": draw(st.integers(0, 2**20)),
        "stops": [_stop(draw) for _ in range(draw(st.sampled_from([1, 2, 3, 4, 5])))],
    }
    _drop_unused_children(spec)
    assume(_FEWEST_NODES <= size(spec) <= _MOST_NODES and can_end(spec))
    return spec


def _drop_unused_children(spec: Node) -> None:
    called = [
        {each.get("child") for each in nodes_of(nodes)}
        for nodes in [spec["main"], *spec["children"]]
    ]
    if 0 not in called[0]:
        spec["children"][0] = []
        called[1] = set()
    if 1 not in called[0] | called[1]:
        spec["children"][1] = []


def _stop(draw: Draw) -> Node:
    """Return a disturbance: a signal, at a part of the calls that are left, or of all lines."""
    return {
        "signal": draw(st.sampled_from(SIGNALS)),
        "on": draw(st.sampled_from(["call"] * 6 + ["clean-up"] * 2 + ["commit", "line"])),
        "part": draw(st.sampled_from(range(2, 100))) / 100,
        "delay": draw(st.sampled_from([0, 0.001, 0.003, 0.006])),
        #: Seconds in which no process executes the run: timeouts end meanwhile.
        "pause": draw(st.sampled_from([0, 0, 0, PAUSE])),
    }


def _block(draw: Draw, depth: int, first_child: int | None) -> Block:
    """Return nodes that are executed one after the other."""
    most = 5 if depth == _DEPTH else 3
    nodes = []
    for _ in range(draw(st.sampled_from(range(1, most + 1)))):
        each = _node(draw, depth, first_child)
        if depth == _DEPTH and _raises(each):
            each = {
                "op": "try",
                "body": [each],
                "catch": ["Exception"],
                "handler": [],
                "finally": [],
            }
        nodes.append(each)
        if _raises(each):  # what comes after it is never executed
            break
    return nodes


def _node(draw: Draw, depth: int, first_child: int | None) -> Node:
    """Return one node; the deeper, the more often one without others in it."""
    names = [*_LEAVES, *([] if first_child is None else ["child"] * 3)]
    inner = [] if depth == 1 else _INNER * (2 if depth == _DEPTH else 1)
    name = draw(st.sampled_from([*names, *inner]))
    if name in _INNER:
        return _inner(draw, name, depth - 1, first_child)
    if name == "child":
        number = draw(st.sampled_from(range(first_child or 0, _CHILDREN)))
        return {"op": "child", "child": number, "arg": draw(_ARGUMENTS)}
    return _leaf(draw, name)


def _leaf(draw: Draw, name: str) -> Node:
    """Return a node that has no others in it."""
    if name in _OPTIONS:
        return {"op": name, **{key: draw(each) for key, each in _OPTIONS[name].items()}}
    options = {"arg": _ARGUMENTS, **_STEPS[name]}
    return {"op": "call", "step": name, **{key: draw(each) for key, each in options.items()}}


def _stuck(draw: Draw) -> Block:
    """Return a block that clearly does not end by itself."""
    how = draw(st.sampled_from(["step", "sleep", "ask", "child"]))
    return [{"op": "stuck", "how": how, "number": draw(_NUMBERS)}]


def _branches(draw: Draw, depth: int, first_child: int | None) -> list[Block]:
    """Return concurrent branches; often equal ones, with a call that gives each another result."""
    if draw(st.booleans()):
        ticket = {"op": "call", "step": "ticket", "arg": 0}
        nodes = [*_block(draw, depth, first_child), ticket]
        return [copy.deepcopy(nodes) for _ in range(draw(st.sampled_from([2, 3, 4])))]
    return [_block(draw, depth, first_child) for _ in range(draw(st.sampled_from([2, 3])))]


def _some_stuck(draw: Draw, depth: int, first_child: int | None) -> list[Block]:
    """Return concurrent branches; sometimes all but the first one clearly do not end."""
    if draw(st.booleans()):
        return [_block(draw, depth, first_child), _stuck(draw), _stuck(draw)]
    return _branches(draw, depth, first_child)


def _let_it_raise(draw: Draw, nodes: Block) -> None:
    """Let a block end with an error, for others wait in vain until they are cancelled."""
    if not _raises(nodes[-1]):
        error = draw(st.sampled_from(RAISED))
        nodes.append({"op": "call", "step": "broken", "arg": "last", "error": error})


def _inner(  # noqa: C901, PLR0912 - one case for each kind
    draw: Draw, name: str, depth: int, first_child: int | None
) -> Node:
    """Return a node with blocks in it."""

    def some() -> Block:
        return _block(draw, depth, first_child)

    fields: Node = {"op": name}
    match name:
        case "if":
            fields["ways"] = [some(), some()]
        case "loop":
            fields["body"] = some()
        case "try":
            fields |= {"body": some(), "catch": list(draw(_CAUGHT))}
            fields["handler"] = some() if fields["catch"] and draw(st.booleans()) else []
            fields["finally"] = some() if draw(st.booleans()) else []
        case "gather":
            fields["branches"] = _branches(draw, depth, first_child)
            fields["return_exceptions"] = draw(st.booleans())
            fields["rest"] = draw(st.sampled_from(["cancel", "finish"]))
        case "group" | "race":
            fields["branches"] = _some_stuck(draw, depth, first_child)
            if name == "group" and _is_stuck(fields["branches"][-1]):
                _let_it_raise(draw, fields["branches"][0])
        case "arrivals":
            fields["branches"] = _branches(draw, depth, first_child)
            fields["take"] = draw(st.sampled_from([1, 2, 3]))
        case "later":
            fields |= {"task": some(), "meanwhile": some()}
        case "split":
            fields |= {"body": some(), "catch": list(draw(_SPLIT))}
            fields["handler"] = some() if draw(st.booleans()) else []
        case "cancel":
            fields |= {"task": _stuck(draw), "meanwhile": some(), "finally": some()}
            fields |= {"times": draw(_TIMES), "turns": draw(st.sampled_from([0, 1, 3]))}
        case "shield":
            fields |= {"task": some(), "meanwhile": some()}
        case "lock" | "queue":
            fields["branches"] = _branches(draw, depth, first_child)
            fields["most"] = draw(_TIMES)
            if name == "queue":
                fields["body"] = some()
        case "timeout":
            fields["fires"] = draw(st.booleans())
            fields["body"] = _stuck(draw) if fields["fires"] else some()
        case _:
            raise AssertionError(name)
    return fields


def _cancelled(draw: Draw) -> Block:
    """Return a program that is cancelled from outside, and cleans up, in one branch or in two."""

    def cleaning(body: Block) -> Node:
        last = _block(draw, 2, 0)
        return {"op": "try", "body": body, "catch": [], "handler": [], "finally": last}

    waiting = cleaning([{"op": "wait_to_be_cancelled"}])
    if draw(st.booleans()):
        waiting = {"op": "group", "branches": [[waiting], [cleaning(_stuck(draw))]]}
    before = [_node(draw, 2, 0) for _ in range(draw(st.sampled_from([0, 1, 2])))]
    return [*before, waiting]


_NUMBERS = st.sampled_from([0, 1, 2])
_ARGUMENTS = st.sampled_from(["last", "last", "last", 0])
_KINDS = st.sampled_from(sorted(KINDS))
_CAUGHT = st.sampled_from(
    [
        ("Exception",),
        ("RefusedError",),
        ("OutOfStockError", "TimeoutError"),
        ("ProviderError",),
        ("ExceptionGroup",),
        (),
    ]
)
_SPLIT = st.sampled_from(
    [("Exception",), ("RefusedError",), ("OutOfStockError", "TimeoutError"), ("ProviderError",)]
)
_TIMES = st.sampled_from([1, 2])
_ABOUT = st.sampled_from([True, True, True, False])
#: What the calls of each step have besides their argument.
_STEPS: dict[str, dict[str, st.SearchStrategy[Any]]] = {
    "make": {"kind": _KINDS, "number": _NUMBERS},
    "describe": {},
    "describe_in_thread": {},
    "change": {},
    "ticket": {"arg": st.just(0)},
    "shared": {"arg": _NUMBERS},
    "nested": {},
    "flaky": {"error": st.sampled_from(RAISED[:2]), "times": st.sampled_from([1, 2])},
    "broken": {"error": st.sampled_from(RAISED)},
    "slow": {"arg": _NUMBERS},
}
#: What other nodes without nodes in them have.
_OPTIONS: dict[str, dict[str, st.SearchStrategy[Any]]] = {
    "change_last": {},
    "spin": {"turns": st.sampled_from([3, 70, 130, 350])},
    "sleep": {"ms": st.sampled_from([0, 5, 20])},
    "ask": {"name": st.sampled_from(["approve", "colour"]), "about": _ABOUT},
    "ask_in_vain": {},
    "raise": {"error": st.sampled_from(RAISED)},
    "draw": {"what": st.sampled_from(["now", "random", "uuid"])},
}
#: As often as they are wanted.
_LEAVES = (
    "make make make make describe describe_in_thread change ticket ticket shared shared nested"
    " flaky broken slow change_last spin sleep ask ask_in_vain raise draw"
).split()
_INNER = (
    "if loop try try split gather gather group group later race arrivals timeout timeout cancel"
    " cancel shield lock queue"
).split()


# --- what is known of a program beforehand --------------------------------------------------------


def inner_blocks(each: Node) -> Iterator[Block]:
    """Yield the blocks in a node."""
    for name in ("body", "handler", "finally", "task", "meanwhile"):
        if name in each:
            yield each[name]
    yield from each.get("ways", [])
    yield from each.get("branches", [])


def nodes_of(nodes: Block) -> Iterator[Node]:
    """Yield all nodes of a block, those inside of others too."""
    for each in nodes:
        yield each
        for inside in inner_blocks(each):
            yield from nodes_of(inside)


def all_nodes(spec: Node) -> Iterator[Node]:
    """Yield all nodes of a program."""
    for nodes in (spec["main"], *spec["children"]):
        yield from nodes_of(nodes)


def size(spec: Node) -> int:
    """Return how many nodes a program has."""
    return sum(1 for _ in all_nodes(spec))


def ops(spec: Node) -> set[str]:
    """Return the kinds of nodes in a program: those of steps and values told apart."""
    found = set()
    for each in all_nodes(spec):
        found.add(each["op"])
        found |= {f"{name} {each[name]}" for name in ("step", "kind", "how") if name in each}
    return found


def _raises(each: Node) -> bool:
    """Return whether a node without others in it raises each time."""
    return each["op"] in ("raise", "ask_in_vain") or each.get("step") in ("broken", "slow")


def may_raise(spec: Node, nodes: Block) -> bool:
    """Return whether an error may leave a block; True where that is not certain."""
    return any(_node_may_raise(spec, each) for each in nodes)


def _node_may_raise(spec: Node, each: Node) -> bool:  # noqa: C901, PLR0911 - one for each kind
    match each["op"]:
        case "wait_to_be_cancelled":
            return True
        case "call" | "raise" | "ask_in_vain":
            return _raises(each)
        case "child":
            return may_raise(spec, spec["children"][each["child"]])
        case "timeout" if each["fires"]:
            return True
        case "try":
            in_body = may_raise(spec, each["body"]) and "Exception" not in each["catch"]
            return in_body or may_raise(spec, each["handler"]) or may_raise(spec, each["finally"])
        case "split":
            in_body = may_raise(spec, each["body"]) and "Exception" not in each["catch"]
            return in_body or may_raise(spec, each["handler"])
        case "gather" if each["return_exceptions"]:
            return False
        case "race" | "arrivals" | "lock":
            return False
        case "cancel" | "shield":
            return may_raise(spec, each["meanwhile"])
        case "queue":
            return may_raise(spec, each["body"])
        case _:
            return any(may_raise(spec, inside) for inside in inner_blocks(each))


def can_end(spec: Node) -> bool:
    """Return whether everything that waits in vain is cancelled at last."""
    cancelled = 0
    for each in all_nodes(spec):
        branches = each.get("branches", [])
        waiting = sum(map(_is_stuck, branches))
        match each["op"]:
            case "group" if waiting:
                ends = any(nodes and _raises(nodes[-1]) for nodes in branches)
            case "timeout" if each["fires"]:
                waiting, ends = 1, _is_stuck(each["body"])
            case "cancel":
                waiting, ends = 1, _is_stuck(each["task"])
            case "try" if _is_stuck(each["body"]):  # next to what is cancelled from outside
                waiting = 1
                ends = any(other["op"] == "wait_to_be_cancelled" for other in all_nodes(spec))
            case _:
                ends = waiting < len(branches) or not waiting
        if not ends:
            return False
        cancelled += waiting
    return cancelled == len([each for each in all_nodes(spec) if each["op"] == "stuck"])


def is_ordered(spec: Node) -> bool:
    """Return whether a program may depend on the order in which steps are completed."""
    found = any(_node_is_ordered(spec, each) for each in all_nodes(spec))
    asked = [each for each in all_nodes(spec) if each["op"] == "ask" and not each["about"]]
    return found or (
        bool(asked) and any("branches" in each or "task" in each for each in all_nodes(spec))
    )


def _node_is_ordered(spec: Node, each: Node) -> bool:
    blocks: list[Block] = each.get("branches", [])
    raising = [nodes for nodes in blocks if may_raise(spec, nodes)]
    quick = [nodes for nodes in blocks if not _is_stuck(nodes)]
    match each["op"]:
        case "race":
            return len(quick) > 1
        case "arrivals" | "queue":
            return True
        case "group":
            return bool(raising) and len(quick) > 1 and not _all_clean_up(spec, blocks)
        case "gather" if not each["return_exceptions"]:
            return len(raising) > 1 or (bool(raising) and each["rest"] == "cancel")
        case "later" | "shield":
            return may_raise(spec, each["meanwhile"])
        case _:
            return False


def _all_clean_up(spec: Node, blocks: list[Block]) -> bool:
    """Return whether each of these branches is cancelled from outside, and then ends by itself."""
    nodes = [each for nodes in blocks for each in nodes]
    waits = ("stuck", "wait_to_be_cancelled")
    return all(
        each["op"] == "try"
        and not each["catch"]
        and each["body"][0]["op"] in waits
        and not may_raise(spec, each["finally"])
        for each in nodes
    )


def _is_stuck(nodes: Block) -> bool:
    return bool(nodes) and bool(nodes[0]["op"] == "stuck")


# --- as Python ------------------------------------------------------------------------------------


def render(spec: Node) -> str:
    """Return a program as Python that a person can read; ``v`` is the last value of a branch."""
    lines = []
    for number, nodes in reversed(list(enumerate(spec["children"]))):
        if any(each.get("child") == number for each in all_nodes(spec)):
            lines += [f"async def child{number}(v):", *_lines(nodes, 1), "    return v", ""]
    lines += [f"async def main(v):  # {spec['input']}", *_lines(spec["main"], 1), "    return v"]
    lines += [f"# stopped: {each['signal']} at {each['part']:.0%}" for each in spec["stops"]]
    return "\n".join(lines)


def _lines(nodes: Block, depth: int) -> list[str]:
    lines = [line for each in nodes for line in _node_lines(each)] or ["pass"]
    return [f"{'    ' * depth}{line}" for line in lines]


def _node_lines(each: Node) -> list[str]:  # noqa: C901, PLR0911, PLR0912 - ditto
    name = each["op"]
    given = "v" if each.get("arg") == "last" else repr(each.get("arg"))
    match name:
        case "call":
            more = [repr(each[key]) for key in ("error", "times", "kind", "number") if key in each]
            words = more if each["step"] == "make" else [*more, given]
            return [f"v = await {each['step']}({', '.join(words)})"]
        case "child":
            return [f"v = await child{each['child']}({given})"]
        case "if":
            ways = each["ways"]
            return ["if way(v) == 0:", *_lines(ways[0], 1), "else:", *_lines(ways[1], 1)]
        case "loop":
            return ["for _ in range(rounds(v)):", *_lines(each["body"], 1)]
        case "try":
            lines = ["try:", *_lines(each["body"], 1)]
            if each["catch"]:
                lines += [f"except ({', '.join(each['catch'])}):", *_lines(each["handler"], 1)]
            return [*lines, "finally:", *_lines(each["finally"], 1)]
        case "timeout":
            fires = "short" if each["fires"] else "long"
            return [f"async with asyncio.timeout({fires}):", *_lines(each["body"], 1)]
        case "split":
            lines = ["try:", *_lines(each["body"], 1), f"except* ({', '.join(each['catch'])}):"]
            return [*lines, *_lines(each["handler"], 1)]
        case "cancel":
            lines = ["async def task():", "    try:", *_lines(each["task"], 2), "    finally:"]
            lines += [*_lines(each["finally"], 2), "task = create_task(task())"]
            lines += [*_lines(each["meanwhile"], 0), f"# cancelled {each['times']} times"]
            return [*lines, f"# with {each['turns']} turns after each"]
        case _ if "branches" in each:
            options = ", ".join(f"{k}={v}" for k, v in each.items() if k not in ("op", "branches"))
            options = options.replace("body=", "with_each=")
            lines = [f"async with {name}({options}):"]
            for nodes in each["branches"]:
                lines += ["    async def branch():", *_lines(nodes, 2)]
            return lines
        case "later" | "shield":
            task = ["async def task():", *_lines(each["task"], 1), f"{name} = create_task(task())"]
            return [*task, *_lines(each["meanwhile"], 0), f"v = [v, await {name}]"]
        case _:
            options = ", ".join(f"{k}={v!r}" for k, v in each.items() if k != "op")
            return [f"await {name}({options})"]
