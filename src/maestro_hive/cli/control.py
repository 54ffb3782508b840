"""``maestro answer``, ``retry``, ``resolve``, ``cancel``, ``fork`` and ``breakers``: run control."""

from __future__ import annotations

import getpass
import re
import sys
from functools import partial
from typing import TYPE_CHECKING

import click

from maestro_hive.admin import breakers
from maestro_hive.admin.runs import find_run, read_run, unknown_step
from maestro_hive.admin.teams import over_own_budget
from maestro_hive.cli import output
from maestro_hive.cli.command import Helpful, breaker_names, duration, run_ids, verb, verb_group
from maestro_hive.cli.show import expected
from maestro_hive.cli.team_report import ONLY_MORE
from maestro_hive.engine.outbox import found_escalation
from maestro_hive.hive import answers, cancelling, control, escalations, resolving
from maestro_hive.hive.answer_types import ShapeError
from maestro_hive.hive.dispatching import belongs_to_workers
from maestro_hive.kernel.errors import ConfigurationError
from maestro_hive.maestro.state.plain import to_dict
from maestro_hive.maestro.state.projections import facts_of, find_step
from maestro_hive.maestro.state.views import OVER, question_id, value_of
from maestro_hive.team.plans import GATE_PREFIX, WORKFLOW, asks

if TYPE_CHECKING:
    from collections.abc import Callable

    from maestro_hive.admin.breakers import BreakerView
    from maestro_hive.cli.command import Call
    from maestro_hive.engine.outbox import StoredEscalation
    from maestro_hive.maestro.state.records import Entry, RunRecord
    from maestro_hive.maestro.state.store import Store

_RUN_ARGUMENT = click.argument("run", metavar="RUN", shell_complete=run_ids)
#: How often a person at the terminal is asked for an answer of the required type.
_TRIES = 5
_NEGATIVE_NUMBER = re.compile(r"-[0-9.][0-9.eE+-]*", re.ASCII)


class TakesNegativeNumbers(Helpful):
    """A verb whose last argument may be a negative number, which looks like an option."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Move negative numbers behind the options, where they are arguments; not those of an option."""
        options = [each for each in self.get_params(ctx) if isinstance(each, click.Option)]
        with_value = {name for each in options if not each.is_flag for name in each.opts}
        others: list[str] = []
        numbers: list[str] = []
        for before, each in zip(["", *args], args, strict=False):
            is_argument = _NEGATIVE_NUMBER.fullmatch(each) and before not in with_value
            (numbers if is_argument else others).append(each)
        if numbers and "--" not in args:
            args = [*others, "--", *numbers]
        return super().parse_args(ctx, args)


@verb("answer", cls=TakesNegativeNumbers)
@_RUN_ARGUMENT
@click.argument("name", metavar="NAME", required=False)
@click.argument("value", metavar="[VALUE]", required=False)
@click.option("--by", metavar="WHO", help="Who answers.  [default: you]")
@click.option("--early", is_flag=True, help="Store the answer for a question not asked yet.")
@click.option("--question", metavar="ID", help="Which one of several questions of this name.")
@click.option("--result", metavar="VALUE", help="Of an escalation: the result of the step.")
@click.option("--give-up", is_flag=True, help="Of an escalation: the workflow gets the error.")
def answer_command(
    call: Call,
    run: str,
    name: str | None,
    value: str | None,
    by: str | None,
    question: str | None,
    result: str | None,
    *,
    early: bool,
    give_up: bool,
) -> None:
    """Answer a question that a run waits for, or an escalation.

    A run that calls hive.wait_for(NAME) continues with the answer: at once if a process executes
    it, otherwise when its program is started again. 'maestro show RUN' shows what is asked, and
    which kind of answer is expected; another kind is refused, and nothing is changed. A question
    takes one answer: whoever comes later is told what it was.

    A step with escalate=True that failed for good waits for a person too. 'maestro escalations'
    lists these. The answer is a text, which is feedback for further attempts; or the result of the
    step itself; or that nobody can help.

    A task of a task graph asks under its id: NAME is the task, and the answer is a text, with which it
    is executed again.

    Examples:
        maestro answer checkout-42 approve yes          a yes or no
        maestro answer checkout-42 approve              asks for the answer
        maestro answer checkout-42 plan '{"size": 3}'   JSON, where an object is expected
        maestro answer checkout-42 note "ship it" --early   before the run asks
        maestro answer shop CART "in euros"             to a task of a task graph
        maestro answer esc-1f0c2a99d3 "use the mirror"      feedback: the step is attempted again
        maestro answer esc-1f0c2a99d3 --result 7            the result of the step
        maestro answer esc-1f0c2a99d3 --give-up             the workflow gets the error
    """
    with call.writing() as store:
        escalation = found_escalation(store, run)
        if escalation is not None:
            if value is not None:
                raise click.UsageError(
                    f"The answer to escalation {run} is one text: quote it, as '{name} {value}'.",
                    click.get_current_context(silent=True),
                )
            _answer_escalation(store, escalation, name, result, by=by or _user(), give_up=give_up)
            return
        if result is not None or give_up or (run.startswith("esc-") and store.run(run) is None):
            raise click.UsageError(
                f"There is no open escalation {run!r}: if there was one, its run has gone on, and"
                " 'maestro events RUN' shows who answered. 'maestro escalations' lists them.",
                click.get_current_context(silent=True),
            )
        record = find_run(store, run)
        if name is None:
            raise click.UsageError(
                "Missing argument 'NAME'.", click.get_current_context(silent=True)
            )
        asked = answers.find_question(store, record.name, name, early=early, question=question)
        if asked is not None:  # whatever is asked meanwhile, it is for the question that was shown
            question = question_id(asked)
        post = partial(
            answers.answer_in_words, store, record.name, name, by=by or _user(), early=early
        )
        if value is None:
            value = _ask_until_it_fits(name, asked, store, partial(post, question=question))
        else:
            post(value, question=question)
    output.line(f"run {record.name} has its answer to {name}: {value}")


def _answer_escalation(
    store: Store,
    record: StoredEscalation,
    text: str | None,
    result: str | None,
    *,
    by: str | None,
    give_up: bool,
) -> None:
    """Post what a person says about a failure: feedback, its result, or that nobody can help."""
    if (result is not None and (give_up or text is not None)) or (
        result is None and not give_up and text is None
    ):
        raise click.UsageError(
            f"Give escalation {record.id} one of: a text, --result VALUE, --give-up.",
            click.get_current_context(silent=True),
        )
    if give_up:
        escalations.give_up(store, record.id, text or "", by=by)
        then = f"the workflow gets the error of {record.step}"
    elif result is not None:
        escalations.give_result_in_words(store, record.id, result, by=by)
        then = f"{record.step} counts as completed with {result}"
    else:
        escalations.give_feedback(store, record.id, text or "", by=by)
        then = f"{record.step} is attempted again with that"
    run_id = str(record.run_id)
    when = "a worker takes the run" if belongs_to_workers(store, run_id) else "its program runs"
    output.line(f"escalation {record.id} of run {run_id} has its answer: {then}, when {when}")


def _ask_until_it_fits(
    name: str, question: Entry | None, store: Store, post: Callable[[str], None]
) -> str:
    """Ask until an answer is of the required type, and post it; not for ever."""
    for _ in range(_TRIES - 1):
        value = _ask(name, question, store)
        try:
            post(value)
        except ShapeError as error:
            output.complain(f"{error}. Try again; Ctrl+C leaves the question open.")
        else:
            return value
    value = _ask(name, question, store)
    post(value)
    return value


def _ask(name: str, question: Entry | None, store: Store) -> str:
    """Ask the person at the terminal, and show what is expected."""
    shape = {} if question is None else facts_of(question).get("shape") or {}
    if not sys.stdin.isatty():
        raise click.UsageError(
            f"There is no VALUE, and stdin is not a terminal; expected is {expected(shape)}.",
            click.get_current_context(silent=True),
        )
    about = value_of(question, store.load) if question is not None else None
    if about is not None:
        output.note(f"{name} is about {output.shortened(output.to_json(about), 1000)}")
    return str(click.prompt(f"{name} ({expected(shape)})", err=True))


def _user() -> str | None:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a user without a name
        return None


@verb("retry")
@_RUN_ARGUMENT
@click.argument("step", metavar="[STEP]", required=False)
def retry_command(call: Call, run: str, step: str | None) -> None:
    """Retry what failed in a run, or one step of it.

    Failed, interrupted and cancelled runs stay as they are until a retry is requested. Completed
    steps stay completed; the others get new attempts. The run is resumed when its program is
    started again, or by a worker if it was started for workers. STEP is a step's number, its name, or
    name#2 for the second step of that name: then only this step gets new attempts, and what depends on
    it runs as usual. Of a run of a task graph, STEP is a task, and 'maestro resume RUN' goes on then.

    Examples:
        maestro retry checkout-42                what failed in it, and in its children
        maestro retry checkout-42 implement      one step that failed or was interrupted
        maestro retry checkout-42 implement#2    the second step of that name
        maestro retry shop CART                  one task of a task graph
        maestro retry checkout-42 7              step number 7, as 'maestro show' lists it
    """
    with call.writing() as store:
        record = find_run(store, run)
        over = over_own_budget(store, record, step)
        control.retry(store, record.name, _step_to_retry(call, store, record, step))
        by_worker = belongs_to_workers(store, record.name)
    what = f"step {step} of run {record.name}" if step else f"run {record.name}"
    when = "a worker takes it" if by_worker else "its program is started"
    if record.workflow == WORKFLOW:
        when = f"it is resumed: {call.command_line('resume', record.name)}"
    if step is None or not over:
        output.line(f"{what} is retried when {when}")
    for each in over:
        output.line(f"{each} is over its budget, which a retry does not raise; {ONLY_MORE}")


def _step_to_retry(
    call: Call, store: Store, record: RunRecord, wanted: str | None
) -> str | int | None:
    """Return the step that is meant: the newest one of a task; raise if the task is complete."""
    if wanted is None or record.workflow != WORKFLOW:
        return wanted
    run = read_run(store, record.name)
    found = find_step(run.state, wanted, newest=True)
    if found is None:
        raise unknown_step(record, wanted, run.state, run.load)
    if found.completed is None:
        return found.number
    if asks(run.value(found.completed)) and run.state.ended is None:
        answer = call.command_line("answer", record.name, found.name, "TEXT")
        raise ConfigurationError(
            f"task {found.name} of run {record.name} has not failed: it waits for an answer, or goes on"
            f" with it; to answer: {answer}"
        )
    is_gate = found.name.startswith(GATE_PREFIX)
    again = (
        "maestro run GRAPH --force" if is_gate else f"maestro run GRAPH --only {found.name} --force"
    )
    raise ConfigurationError(
        f"{found.name} of run {record.name} has not failed, so there is nothing to retry; to execute"
        f" {'all' if is_gate else 'it'} again: {again}"
    )


@verb("resolve", reads=True)
@_RUN_ARGUMENT
@click.argument("step", metavar="STEP")
@click.option("--completed", "result", metavar="VALUE", help="It had its effect, with this result.")
@click.option("--rerun", is_flag=True, help="It had not: execute it again.")
@click.option("--by", metavar="WHO", help="Who says so.  [default: you]")
def resolve_command(
    call: Call, run: str, step: str, result: str | None, by: str | None, *, rerun: bool
) -> None:
    """Say whether an ambiguous step had its effect.

    A step with on_ambiguous="ask" whose process was killed or stopped in the middle of it may have
    had its effect, such as a payment: its run is suspended until a person decides. Look for the
    effect by its effect_key. VALUE is read as the type that the step returns, as JSON where that is
    an object or a list. It counts for exactly this step: its number, its name, or name#2. The run
    is resumed when its program is started again, or by a worker if it belongs to workers.

    Examples:
        maestro resolve order-7 charge --completed '{"receipt": "A-1"}'   it was charged
        maestro resolve order-7 charge#2 --rerun                          it was not
    """
    if (result is None) is not rerun:
        raise click.UsageError(
            "Give either --completed VALUE or --rerun.", click.get_current_context(silent=True)
        )
    with call.writing() as store:
        name, who = find_run(store, run).name, by or _user()
        if result is None:
            done = resolving.rerun(store, name, step, by=who)
        else:
            done = resolving.complete_in_words(store, name, step, result, by=who)
        by_worker = belongs_to_workers(store, name)
    if call.wants_json:
        call.print_json(resolved=to_dict(done))
        return
    what = "will be executed again" if rerun else f"counts as completed with {result}"
    when = "" if done.taken else ", as soon as the process that has the run resumes it"
    then = "a worker resumes the run" if by_worker else "start its program to resume the run"
    output.line(f"step {done.label} of run {name} {what}{when}; {then}")


@verb("cancel")
@_RUN_ARGUMENT
@click.option("--reason", metavar="TEXT", default="", help="The reason; callers receive it.")
@click.option("--yes", is_flag=True, help="Do not ask.")
def cancel_command(call: Call, run: str, reason: str, *, yes: bool) -> None:
    """Cancel a run and its children.

    A process that executes it stops the run's steps, those of its children too, and records the
    end; if no process does, the end is recorded at once, of its children to any depth too. Completed
    steps stay completed: 'maestro retry' resumes the run.

    Examples:
        maestro cancel checkout-42
        maestro cancel checkout-42 --reason "wrong page" --yes
    """
    with call.writing() as store:
        record = find_run(store, run)
        if not cancelling.unfinished(store, record.name):
            output.line(f"run {record.name} is over already: {record.status}")
            return
        call.confirm(f"Cancel run {record.name!r} and its children?", yes=yes)
        cancelling.cancel(store, record.name, reason)
        now = store.run(record.name)
    if record.status in OVER:
        output.line(
            f"run {record.name} was over already ({record.status}); its children are cancelled"
        )
        return
    cancelled = now is not None and now.status == "cancelled"
    what = "is cancelled" if cancelled else "will be cancelled by the process that executes it"
    output.line(f"run {record.name} {what}")


@verb("fork")
@_RUN_ARGUMENT
@click.option(
    "--from-step", metavar="STEP", help="Execute this step again: its number, name, or name#2."
)
@click.option(
    "--set",
    "settings",
    metavar="NAME=VALUE",
    multiple=True,
    help="Replace an argument of the workflow; VALUE is read as the parameter's type.",
)
@click.option("--as", "name", metavar="NEW_RUN", help="The new run's name.  [default: generated]")
def fork_command(
    call: Call, run: str, from_step: str | None, settings: tuple[str, ...], name: str | None
) -> None:
    """Start a new run from the completed steps of another.

    Steps before STEP stay completed, STEP is executed again, and those after it run again exactly
    when their input changes. The original is not changed. Nothing is executed yet: the program that
    has the workflow continues with hive.resume(NEW_RUN). A VALUE that is not of the parameter's type
    is refused; of a parameter without a type it is JSON, or else text.

    Examples:
        maestro fork checkout-42 --from-step implement        that step again, and what depends on it
        maestro fork checkout-42 --set feature="cart page"    another argument
        maestro fork checkout-42 --set size='{"wide": 3}'     as JSON, where it is an object
        maestro fork checkout-42 --as checkout-43             with a name of your own
    """
    changed = dict(_setting(each) for each in settings)
    with call.writing() as store:
        record = find_run(store, run)
        made = control.fork(store, record.name, from_step=from_step, in_words=changed, new_id=name)
    output.line(f"run {made} was forked from {record.name}; hive.resume({made!r}) executes it")


def _setting(text: str) -> tuple[str, str]:
    name, separator, value = text.partition("=")
    if not separator or not name:
        raise click.UsageError(
            f"--set takes NAME=VALUE, and {text!r} is not that.",
            click.get_current_context(silent=True),
        )
    return name, value


@verb_group("breakers", alone=True)
def breakers_command(call: Call) -> None:
    """Show the circuit breakers; open or reset one.

    After too many failures a breaker opens, and nothing behind it is called until its cooldown is
    over; then one call is allowed as a probe. All processes on the folder share it, and a change
    made here applies to all of them from their next call on. A breaker without a failure so far is
    not listed.

    Examples:
        maestro breakers                            which are open, and for how long
        maestro breakers --json                     the same, for another program
        maestro breakers reset anthropic            allow calls again, now
        maestro breakers open anthropic --for 2h    allow none for two hours
    """
    with call.reading() as reader:
        found = breakers.list_breakers(reader)
    if call.wants_json:
        call.print_json(breakers=[to_dict(each) for each in found])
        return
    output.table(
        ["name", "state", "failures", "opened", "probe in", "because"],
        [_breaker_row(each) for each in found],
        empty="there are no breakers: nothing has failed behind one",
    )


def _breaker_row(breaker: BreakerView) -> list[output.Cell]:
    remaining = breaker.remaining_seconds
    probe = output.duration(remaining) if remaining else "at the next call"
    return [
        breaker.name,
        output.status(breaker.state),
        breaker.consecutive_failures,
        breaker.opened_at,
        None if breaker.state == "closed" else probe,
        breaker.opened_because,
    ]


@verb("reset", group=breakers_command)
@click.argument("name", metavar="NAME", shell_complete=breaker_names)
def reset_breaker(call: Call, name: str) -> None:
    """Close a breaker: its calls are allowed again.

    Its failures are forgotten. If the calls still fail, it opens again after as many failures as
    the first time. The result of a probe that has started is ignored.

    Examples:
        maestro breakers reset anthropic
    """
    with call.writing() as store:
        breakers.reset_breaker(store, name)
    output.line(f"breaker {name!r} is closed: its calls are allowed")


@verb("open", group=breakers_command)
@click.argument("name", metavar="NAME", shell_complete=breaker_names)
@click.option("--for", "seconds", type=duration, default="5m", show_default=True)
@click.option("--new", is_flag=True, help="Open also one that is not listed.")
def open_breaker(call: Call, name: str, seconds: float, *, new: bool) -> None:
    """Open a breaker: its calls fail at once, without being made.

    When the time is over one call is allowed as a probe, as after failures. To end it earlier,
    reset it.

    Examples:
        maestro breakers open anthropic             for five minutes
        maestro breakers open anthropic --for 2h
        maestro breakers open billing --new         nothing has failed behind it so far
    """
    with call.writing() as store:
        breakers.open_breaker(store, name, seconds, create=new)
    output.line(f"breaker {name!r} is open for {output.duration(seconds)}: its calls fail at once")
