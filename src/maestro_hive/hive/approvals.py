"""Approvals: what a policy lets happen only if a person agrees is a durable question of its run."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from maestro_hive.engine.policy import Approval
from maestro_hive.engine.step_record import RunStep
from maestro_hive.hive import answer_types, runs, waits
from maestro_hive.hive.branches import place_inside
from maestro_hive.maestro.state import codec
from maestro_hive.maestro.state.projections import facts_of

if TYPE_CHECKING:
    from maestro_hive.engine.step import StepExecution
    from maestro_hive.hive.active_run import ActiveRun
    from maestro_hive.maestro.state.codec import Json
    from maestro_hive.maestro.state.records import Entry


class _Question:
    """The question of one call of a step; its answer is no outcome that the workflow waits for."""

    def __init__(self, run: ActiveRun, identity: bytes) -> None:
        self.run = run
        self.identity = identity

    def reserve(self, outcome: Entry) -> None:
        """Take no place: the workflow gets the outcome of the step."""


class Approvals:
    """Asks for the steps of a run; ``maestro answer RUN approve-STEP yes`` answers."""

    def __init__(self, run: ActiveRun) -> None:
        self._run = run

    async def ask(self, step: StepExecution, about: dict[str, Json]) -> Approval:
        """Return the recorded answer, or ask and wait for it."""
        record = step.record
        assert isinstance(record, RunStep)
        run, called, subject = self._run, record.plan.identity, codec.encode(about, "about")
        name, shape = f"approve-{step.name}", answer_types.shape_of(bool)
        # Not by the rule, which is another one after an edit of the file.
        what = [about["tool"], about["action"], about["paths"]]
        content = runs.identity_of(name, codec.dump_canonical(what))
        question = _Question(run, place_inside(called, content))
        if self._answer(question) is None:
            with_step = {"step": called.hex()}
            await waits.ask(run, question.identity, name, None, shape, subject, **with_step)
            try:
                await waits.answered(question, name, None)
            except asyncio.CancelledError:
                self._withdraw(question, name)
                raise
        ended = self._answer(question)
        assert ended is not None
        return Approval(waits.value_of_answer(run, ended) is True, facts_of(ended).get("by"))

    def _answer(self, question: _Question) -> Entry | None:
        ended = self._run.run.state.answers.get(question.identity)
        return ended if ended is not None and facts_of(ended)["how"] == "answered" else None

    def _withdraw(self, question: _Question, name: str) -> None:
        """Record that nobody waits for the answer any more, unless the run is only suspended."""
        run = self._run
        if run.is_stopping or question.identity in run.run.state.answers:
            return
        with run.suspended_by_failure:
            run.append(runs.wait_ended(question.identity, name, "cancelled"))
