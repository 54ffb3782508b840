"""Which branch of a workflow a call stands in: its tasks, numbered by their creation.

Equal calls are told apart by their position: the branch, and the number of the call there. Which of
them was first is a matter of time, and would be another one after a restart. A wrapped task factory
gives each task that a workflow creates (``gather``, a task group, ``create_task``) its branch. A task
that was made without it gets its branch at its first durable call.
"""

from __future__ import annotations

import asyncio
import hashlib
import zlib
from contextvars import Context, ContextVar, copy_context
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from maestro_hive.hive.as_completed import ordered
from maestro_hive.hive.errors import OutsideRunError

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from maestro_hive.hive.active_run import ActiveRun
    from maestro_hive.hive.as_completed import Given, Work
    from maestro_hive.hive.history import History, Slot
    from maestro_hive.maestro.state.records import Entry, NewEntry

    TaskFactory = Callable[..., asyncio.Future[Any]]

#: An identity is the content of a call, and its position.
CONTENT_BYTES = 20
_POSITION_BYTES = 12
#: The position of the first call of its content in the workflow's own task.
FIRST = bytes(_POSITION_BYTES)
#: What other positions start with: those of a workflow, and those inside the body of a step.
_IN_WORKFLOW, _IN_BODY = b"\x01", b"\x02"

_active: ContextVar[ActiveRun | None] = ContextVar("active_run", default=None)
_branch: ContextVar[Branch | None] = ContextVar("branch", default=None)
#: The branches of tasks whose context is not ours to change: it may be that of others, too.
_by_task: WeakKeyDictionary[asyncio.Future[Any], Branch] = WeakKeyDictionary()
#: Those of such tasks that are being made, by their coroutine: an eager one starts at once.
_by_work: dict[object, Branch] = {}
#: For callbacks that are not the workflow's.
_NO_CONTEXT = Context()


class Branch:
    """One task of a workflow, or of the body of a step; ``history`` is None in a body."""

    __slots__ = (
        "_calls",
        "_digest",
        "_ended",
        "_notes",
        "_open",
        "_parent",
        "_start",
        "_tasks",
        "given",
        "has_ended",
        "history",
        "is_busy",
        "path",
        "task",
    )

    def __init__(self, history: History | None, path: str, parent: Branch | None = None) -> None:
        self.history = history
        self.path = path
        #: The task that it is, from its start to its end.
        self.task: asyncio.Future[Any] | None = None
        self.has_ended = False
        #: Whether an operation is being executed in it, so that it is not the workflow's turn.
        self.is_busy = False
        self._tasks = 0
        self._calls: dict[bytes, int] = {}
        #: What was recorded before it, and what was in it so far.
        self._start: bytes = b"" if parent is None else parent.digest
        self._digest: bytes = self._start
        self._notes: list[bytes] = []
        #: Its branches: those whose task has not ended, and the sum of what the others recorded.
        #: (A sum, for they end in any order, and a workflow may make any number of them.)
        self._parent = parent
        self._open: set[Branch] = set()
        self._ended = 0
        #: The coroutines that ``as_completed`` was given, while it makes their tasks.
        self.given: Given | None = None

    def new(self, element: str = "") -> Branch:
        """Return the branch of a task that is created in this one; ``element`` is its own name."""
        if not element:
            element = f"{self._tasks}"
            self._tasks += 1
        path = f"{self.path}/{element}" if self.path else element
        branch = Branch(self.history, path, self)
        self._open.add(branch)
        return branch

    def number_of(self, content: bytes) -> int:
        """Return how many calls of this content were made here, with this one."""
        number = self._calls[content] = self._calls.get(content, 0) + 1
        return number

    def place(self, content: bytes, extra: bytes = b"") -> bytes:
        """Return the identity of the next call of this content here; ``extra`` is a part of it."""
        short = content[:CONTENT_BYTES]
        number = self.number_of(short)
        if number == 1 and not self.path and not extra:
            return short + FIRST
        mark = _IN_BODY if self.history is None else _IN_WORKFLOW
        place = hashlib.sha256(f"{self.path}#{number}#".encode() + extra).digest()
        return short + mark + place[: _POSITION_BYTES - 1]

    def note(self, identity: bytes, outcome: bytes | None) -> None:
        """Take into account what was recorded in this branch."""
        self._notes += (identity, outcome or b"")

    @property
    def digest(self) -> bytes:
        """A digest of what was recorded before it, and in it so far."""
        if self._notes:
            self._digest = hashlib.sha256(b"\0".join([self._digest, *self._notes])).digest()
            self._notes.clear()
        return self._digest

    def recorded(self) -> bytes:
        """Return a digest of what this branch, and those of its tasks that are done, recorded."""
        for each in [each for each in self._open if each.task is not None and each.task.done()]:
            each.end()
        return hashlib.sha256(self.digest + self._ended.to_bytes(32)).digest()

    def watch(self, task: asyncio.Future[Any], loop: asyncio.AbstractEventLoop) -> None:
        """Note its task, and its end; that task was made on this loop."""
        self.task = task
        history = self.history
        if history is not None and history.loop is loop:
            history.add(self)
        elif task.done():  # an eager one
            self.end()
        else:
            task.add_done_callback(lambda _: self.end(), context=_NO_CONTEXT)

    def end(self) -> None:
        """Note that its task has ended: of what it recorded, only the digest matters from now on."""
        parent = self._parent
        if self.task is not None:
            _by_task.pop(self.task, None)  # it refers to the task, so that would stay for ever
            # The context of the task has the branch: both would wait for the garbage collector.
            self.task, self.has_ended = None, True
        if parent is not None and self in parent._open:  # noqa: SLF001 - of its own class
            parent._open.remove(self)  # noqa: SLF001
            recorded = self.recorded()
            if self._ended or self.digest != self._start:
                own = hashlib.sha256(self.path.encode() + b"\0" + recorded).digest()
                parent._ended = (parent._ended + int.from_bytes(own)) % _SUMS  # noqa: SLF001


#: Digests are added modulo this.
_SUMS = 1 << 256


def place_inside(identity: bytes, content: bytes) -> bytes:
    """Return the identity of something that one call consists of: in a body, if the call is."""
    mark = _IN_BODY if is_in_body(identity) else _IN_WORKFLOW
    place = hashlib.sha256(identity + content).digest()
    return content[:CONTENT_BYTES] + mark + place[: _POSITION_BYTES - 1]


def is_in_body(identity: bytes) -> bool:
    """Return whether a call stands inside the body of a step."""
    return identity[CONTENT_BYTES : CONTENT_BYTES + 1] == _IN_BODY


def current_branch() -> Branch | None:
    """Return the branch that is executed here."""
    loop = asyncio._get_running_loop()  # noqa: SLF001 - None in a thread of a step
    task = None if loop is None else asyncio.current_task(loop)
    return _branch.get() if task is None else _branch_in(task)


def _branch_in(task: asyncio.Task[Any]) -> Branch | None:
    """Return the branch that is executed in the current task."""
    found = _branch.get()
    if found is not None and found.task is task and not found.is_busy:
        return found
    own = _by_task.get(task) or _by_work.get(task.get_coro())
    if own is not None:
        # In an operation, its context has what is executed there: nothing, or the body of a step.
        is_inside = own.is_busy and (found is None or found.history is None)
        return found if is_inside else None if own.is_busy else own
    if found is None or found.task is task:
        return found
    if found.task is None and not found.has_ended:
        return found
    return _branch_without_factory(found, task)


def _branch_without_factory(parent: Branch, task: asyncio.Task[Any]) -> Branch:
    """Return a new branch for a task that was made without the factory, in this branch's context.

    Its number is that of its first durable call, among such tasks.
    """
    branch = parent.new(f"+{parent.number_of(b'+')}")
    _by_task[task] = branch
    branch.watch(task, task.get_loop())
    return branch


def branch_of(handle: asyncio.Handle) -> Branch | None:
    """Return the branch in whose code a callback was made, or whose task it wakes."""
    context: Context = handle._context  # type: ignore[attr-defined]  # noqa: SLF001 - the only way
    found = context.get(_branch)
    if found is None and _by_task:
        task = getattr(handle._callback, "__self__", None)  # type: ignore[attr-defined]  # noqa: SLF001
        own = _by_task.get(task) if isinstance(task, asyncio.Task) else None
        return None if own is None or own.is_busy else own
    return found


def leave_branches() -> None:
    """Go on outside of all branches: in a task of our own."""
    _branch.set(None)


def detached_task(
    loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, None]
) -> asyncio.Task[None]:
    """Start a task that is no branch of a workflow."""
    token = _branch.set(None)
    try:
        return loop.create_task(work)
    finally:
        _branch.reset(token)


def enter_body(identity: bytes) -> None:
    """Go on in the body of a step: what it calls stands there, and starts again at each attempt."""
    _branch.set(Branch(None, identity.hex()))


# --- durable calls --------------------------------------------------------------------------------

#: How often a branch may be cancelled while its last outcome is being delivered.
_CANCELLATIONS = 100
#: How much longer than before a workflow may take to cancel a call that it cancelled before.
PATIENCE_SECONDS = 5.0
#: What is noted in a branch of a call that it cancelled.
_CANCELLED = b"cancelled"


def active_run(what: str, name: str = "") -> ActiveRun:
    """Return the run that is executed here; ``what`` needs one."""
    found = _active.get()
    if found is None:
        named = f"{what} {name!r}" if name else what
        raise OutsideRunError(
            f"{named} was called outside a run: call it from a workflow that hive.run executes"
        )
    return found


def active_run_or_none() -> ActiveRun | None:
    """Return the run that is executed here, if there is one."""
    return _active.get()


def enter_run(run: ActiveRun, root: Branch) -> Context:
    """Return the context of a run's workflow."""
    context = copy_context()
    context.run(_active.set, run)
    context.run(_branch.set, root)
    return context


class _Turn:
    """The turn of one outcome, which may come while its operation is being cancelled."""

    __slots__ = ("_operation", "future", "is_reached")

    def __init__(self, operation: Operation, loop: asyncio.AbstractEventLoop) -> None:
        self._operation = operation
        self.future: asyncio.Future[None] = loop.create_future()
        self.is_reached = False

    def reach(self) -> None:
        """Let the operation end: it is the workflow's turn from now on."""
        self.is_reached = True
        if not self.future.done():
            history = self._operation.history
            assert history is not None
            history.leave(self._operation.branch)
            self.future.set_result(None)


class Operation:
    """One durable call of a workflow: a step, a child, a sleep or a question.

    It has a position, so it is found again, and its outcome is delivered in the recorded order.
    ``close`` ends it.
    """

    __slots__ = ("_slot", "_token", "branch", "history", "identity", "run", "task")

    def __init__(self, run: ActiveRun) -> None:
        driver = run.driver
        if run.has_stopped or (driver is not None and driver.cancelling()):  # as ``is_stopping``
            run.check_active()
        loop = asyncio.get_running_loop()
        task = asyncio.current_task(loop)
        assert task is not None
        branch = _branch_in(task) or run.detached
        history = branch.history
        self.run = run
        self.task = task
        self.branch = branch
        self.identity = b""
        self._slot: Slot | None = None
        run.operations.add(self)
        self._token = _branch.set(None)  # tasks that are created inside of it are not numbered
        if history is not None and history.loop is not loop:
            history = None  # the order is that of the run's own loop
        self.history = history
        branch.is_busy = True
        if history is not None:
            history.reacting.discard(branch)  # it does nothing until this has its outcome

    def close(self) -> None:
        """Go on in the workflow's own code."""
        branch, history = self.branch, self.history
        self.run.operations.discard(self)
        branch.is_busy = False
        if history is not None:
            if branch in history.branches:
                history.reacting.add(branch)
            if self._slot is not None and self._slot.deliver is None:
                history.drop(self._slot)  # it ended before its outcome was at hand
        try:  # noqa: SIM105 - on the path of every step
            _branch.reset(self._token)
        except ValueError:  # closed by another context
            pass

    # --- which one it is ---

    def place(self, content: bytes, extra: bytes = b"") -> bytes:
        """Return its identity: what is called, and where."""
        identity = self.identity = self.branch.place(content, extra)
        return identity

    def place_of(self, content: bytes) -> bytes:
        """Return the identity of a call of another content at the same place."""
        return content[:CONTENT_BYTES] + self.identity[CONTENT_BYTES:]

    def place_by_key(self, content: bytes, extra: bytes = b"") -> bytes:
        """Return its identity where a key was given: then its position is of no importance.

        ``extra`` is a part of it, in the place of the position.
        """
        place = _IN_WORKFLOW + extra[: _POSITION_BYTES - 1] if extra else FIRST
        self.identity = content[:CONTENT_BYTES] + place
        return self.identity

    async def find(self, content: bytes) -> None:
        """Become the call that is recorded here, or an equal one that moved; else a new one."""
        self.place(content)
        if self.run.resumed_at and not self.run.replay.claim(self.identity):
            await self.find_moved(content)

    async def find_moved(self, *contents: bytes) -> None:
        """Take the place of an equal call that changed code makes elsewhere, or no longer makes.

        Not before all branches have found what is recorded for their own calls.
        """
        history, replay = self.history, self.run.replay
        if history is None:
            return  # the body of a step is not replayed
        if replay.find(contents) is not None and not history.is_alone:
            await self._when(history.when_unclaimed)
        found = replay.find(contents)
        if found is not None:
            replay.claim(found)
            self.identity = found
        elif replay.is_claimed(self.identity):
            self.place(contents[0], b"moved")  # an equal call elsewhere has taken its record

    # --- when it is its turn ---

    def hold(self) -> None:
        """Have nothing delivered until ``release``: which call it is takes a while to say."""
        if self.history is not None:
            self.history.hold()

    def release(self) -> None:
        """Go on."""
        if self.history is not None:
            self.history.release()

    async def may_execute(self, name: str) -> None:
        """Return when it may be executed, and note that it is: it may be new to a resumed run."""
        if self.run.resumed_at:
            await self.wait_for_replay()
            self.run.replay.note_executed(self.identity, name)

    async def wait_for_replay(self) -> None:
        """Return when it may be executed: after everything that is recorded was delivered."""
        history = self.history
        if history is not None and history.is_replaying and not history.is_alone:
            await self._when(history.when_replayed)

    async def _when(self, when: Callable[[Callable[[], None]], None]) -> None:
        future = asyncio.get_running_loop().create_future()
        when(lambda: None if future.done() else future.set_result(None))
        await future

    def reserve(self, outcome: Entry) -> None:
        """Take the place of its outcome in the order, as soon as that is recorded."""
        history = self.history
        if history is None or self._slot is not None:
            return
        if not history.is_alone:
            self._slot = history.reserve(outcome)

    async def turn(self, outcome: Entry, content: bytes | None) -> None:
        """Return when it is the turn of its outcome; ``content`` is what the workflow sees of it."""
        self.reserve(outcome)
        if self._slot is not None:
            cancelled = await self._reach_turn(outcome)
            if cancelled is not None:  # whoever cancelled it does not want the outcome any more
                raise cancelled
        self.branch.note(self.identity, content)

    async def _reach_turn(self, outcome: Entry) -> asyncio.CancelledError | None:
        """Return when it is the turn of its outcome, and how it was cancelled meanwhile.

        A cancellation ends it in that turn and not before: whether its outcome was being recorded,
        or had been, when the workflow cancelled it is not the same in every life.
        """
        self.reserve(outcome)
        history, slot = self.history, self._slot
        if history is None or slot is None:
            return None
        turn = _Turn(self, history.loop)
        cancelled: asyncio.CancelledError | None = None
        for _ in range(_CANCELLATIONS):
            history.set_ready(slot, turn.reach)
            try:
                await turn.future
            except asyncio.CancelledError as error:
                cancelled = error
                if self.run.is_stopping:
                    history.drop(slot)
                    raise
            if turn.is_reached:
                break
            turn.future = history.loop.create_future()
        return cancelled

    async def end_cancelled(self, outcome: Entry) -> None:
        """Return in the turn of an outcome that was recorded although the workflow cancelled it."""
        if not self.run.is_stopping:
            await self._reach_turn(outcome)

    async def turn_despite_cancellation(self, outcome: Entry, content: bytes | None) -> None:
        """Return when it is the turn of its outcome, however often it is cancelled meanwhile.

        It is for an outcome that came after a cancellation, or is one.
        """
        await self._reach_turn(outcome)
        self.branch.note(self.identity, content)

    async def record_cancelled(self, entry: NewEntry, recorded: Callable[[], Entry | None]) -> None:
        """Record that the workflow cancelled it, and return when it is the turn of that.

        ``recorded`` returns its outcome once it has one. Nothing is recorded of a suspension.
        """
        run = self.run
        if run.is_stopping or self.history is None:
            return
        with run.suspended_by_failure:
            run.append(entry)  # at once: it may be cancelled again
        outcome = recorded()
        assert outcome is not None
        await self.turn_despite_cancellation(outcome, _CANCELLED)

    async def cancelled_again(self, outcome: Entry, started: Entry | None) -> None:
        """Raise the cancellation that was recorded, when the workflow makes it again.

        Return if it does not, for somewhat longer than it took before: its code has changed.
        """
        history = self.history
        took = 0.0 if started is None else (outcome.at - started.at) / 1e6
        if history is None:
            return
        slot = self._slot = history.reserve(outcome)
        try:
            await asyncio.sleep(took + PATIENCE_SECONDS)
        except asyncio.CancelledError:
            if not self.run.is_stopping:
                await self.turn_despite_cancellation(outcome, _CANCELLED)
            raise
        finally:
            self._slot = None
            if slot.deliver is None:
                history.drop(slot)


# --- the task factory -----------------------------------------------------------------------------


class WorkflowTask(asyncio.Task[Any]):
    """A task whose place in a set depends on its branch, and not on its address.

    So a workflow gets those that ``asyncio.wait`` returns in the same order again.
    """

    def __init__(self, work: Work, path: str, **options: Any) -> None:
        self._place = zlib.crc32(path.encode())
        super().__init__(work, **options)

    def __hash__(self) -> int:
        return self._place


class _Factory:
    """Makes the tasks of a loop as they were made before, and gives those of workflows a branch."""

    def __init__(self, before: TaskFactory | None) -> None:
        self.before = before
        #: How many runs need it.
        self.users = 0
        #: The class of the tasks, where it is known; and the factory as the loop gets it.
        self._task_class: Callable[..., asyncio.Future[Any]] | None = None
        self.installed: TaskFactory = self
        if before is None:
            self._task_class = asyncio.Task
        elif getattr(before, "__code__", None) is _EAGER:
            # Made as eager ones are made: others (anyio) recognize them by that.
            (cell,) = getattr(before, "__closure__")  # noqa: B009 - of a function
            self._task_class = cell.cell_contents
            make_factory: Any = asyncio.create_eager_task_factory  # type: ignore[attr-defined]
            self.installed = make_factory(self._construct)

    def _construct(
        self, work: Work, *, loop: asyncio.AbstractEventLoop, **options: Any
    ) -> asyncio.Future[Any]:
        return self(loop, work, **options)

    def __call__(
        self, loop: asyncio.AbstractEventLoop, work: Work, **options: Any
    ) -> asyncio.Future[Any]:
        parent = current_branch() if self.users else None
        if parent is None:
            return self._make(loop, work, options)
        work, branch = ordered(parent, work)
        history = branch.history
        if history is not None and history.loop is loop:
            history.branches.add(branch)  # before it is made: an eager task starts at once
        # Set while it is made: it copies the context.
        token = _branch.set(branch)
        has_context = options.get("context") is not None
        if has_context:
            _by_work[work] = branch
        try:
            task = self._make(loop, work, options, branch)
        except BaseException:
            branch.end()
            if history is not None:
                history.branches.discard(branch)
            raise
        finally:
            _branch.reset(token)
            if has_context:
                del _by_work[work]
        if has_context:
            _by_task[task] = branch
        branch.watch(task, loop)
        return task

    def _make(
        self,
        loop: asyncio.AbstractEventLoop,
        work: Work,
        options: dict[str, Any],
        branch: Branch | None = None,
    ) -> asyncio.Future[Any]:
        made = self._task_class
        if made is None:
            assert self.before is not None
            return self.before(loop, work, **options)
        if made is asyncio.Task and branch is not None and branch.history is not None:
            return WorkflowTask(work, branch.path, loop=loop, **options)
        return made(work, loop=loop, **options)


#: What eager factories are recognized by; of Python 3.12.
_EAGER = getattr(getattr(asyncio, "eager_task_factory", None), "__code__", object())


#: The factory that is in use on each loop.
_factories: WeakKeyDictionary[asyncio.AbstractEventLoop, _Factory] = WeakKeyDictionary()


def number_tasks(loop: asyncio.AbstractEventLoop) -> None:
    """Have the tasks of workflows numbered on this loop, until ``stop_numbering``."""
    factory = _factories.get(loop)
    if factory is None:
        factory = _factories[loop] = _Factory(loop.get_task_factory())
        loop.set_task_factory(factory.installed)
    factory.users += 1


def stop_numbering(loop: asyncio.AbstractEventLoop) -> None:
    """Restore the task factory of before, when no other run needs ours and ours is still set."""
    factory = _factories[loop]
    factory.users -= 1
    if not factory.users:
        del _factories[loop]
        now: object = loop.get_task_factory()
        if now is factory.installed:
            loop.set_task_factory(factory.before)
