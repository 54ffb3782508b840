"""The concurrent nodes of programs, by anyio: its task groups, cancel scopes and streams."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import anyio

from faults.twin.program import LONG, SHORT, Run
from faults.twin.values import show_error

if TYPE_CHECKING:
    from anyio.streams.memory import MemoryObjectSendStream

    from faults.twin.program import Branch, Node


class AnyioRun(Run):
    """One execution of a workflow that uses anyio."""

    async def _do_group(self, branch: Branch, path: str, node: Node) -> None:
        found: dict[int, Any] = {}

        async def one(number: int, nodes: list[Node]) -> None:
            found[number] = await self._branch(branch, path, number, nodes)

        async with anyio.create_task_group() as group:
            for number, nodes in enumerate(node["branches"]):
                group.start_soon(one, number, nodes)
        branch.last = [found[number] for number in range(len(node["branches"]))]

    async def _do_race(self, branch: Branch, path: str, node: Node) -> None:
        found: list[tuple[int, Any]] = []

        async def one(number: int, nodes: list[Node]) -> None:
            try:
                value = await self._branch(branch, path, number, nodes)
            except Exception as error:  # noqa: BLE001 - the program's own errors
                value = show_error(error)
            found.append((number, value))
            group.cancel_scope.cancel()

        async with anyio.create_task_group() as group:
            for number, nodes in enumerate(node["branches"]):
                group.start_soon(one, number, nodes)
        self._saw(branch, path, "won", str(found[0][0]))
        branch.last = [found[0][1]]

    async def _do_arrivals(self, branch: Branch, path: str, node: Node) -> None:
        found: list[Any] = []
        send, receive = anyio.create_memory_object_stream[tuple[int, Any]](0)

        async def one(
            number: int, nodes: list[Node], own: MemoryObjectSendStream[tuple[int, Any]]
        ) -> None:
            async with own:
                await own.send(await self._numbered(branch, path, number, nodes))

        async with anyio.create_task_group() as group:
            async with send:
                for number, nodes in enumerate(node["branches"]):
                    group.start_soon(one, number, nodes, send.clone())
            async with receive:
                async for number, value in receive:
                    self._saw(branch, path, "arrived", str(number))
                    found.append([number, value])
                    if len(found) == node["take"]:
                        group.cancel_scope.cancel()
                        break
        branch.last = found

    async def _do_timeout(self, branch: Branch, path: str, node: Node) -> None:
        try:
            with anyio.fail_after(SHORT if node["fires"] else LONG / 2):
                await self.block(branch, f"{path}.body", node["body"])
        except TimeoutError as error:
            self._saw(branch, path, "timeout", type(error).__name__)
            raise
