"""What a persona is told: the prompt of a task, made of its document; pure."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from maestro_hive.team.graph import Files, Task


def prompt_of(task: Task) -> str:
    """Return the prompt of a task: its own, or one made of title, description and context.

    Files, steps, criteria and the verification are named in both cases.
    """
    parts = [task.prompt] if task.prompt is not None else _told(task)
    return "\n\n".join([*parts, *_rules(task)]) + "\n"


def with_feedback(prompt: str, feedback: Sequence[str]) -> str:
    """Return a prompt with what failed before."""
    if not feedback:
        return prompt
    return f"{prompt}\nWhat failed before:\n\n" + "\n\n".join(feedback) + "\n"


def _told(task: Task) -> list[str]:
    texts = [f"{task.id}: {task.title}", task.description, task.context or ""]
    return [each.strip() for each in texts if each.strip()]


def _rules(task: Task) -> Iterator[str]:
    if files := list(_files(task.files)):
        yield "\n".join(files)
    if task.steps:
        yield "\n".join(["Steps:", *(_step(task, at) for at in range(len(task.steps)))])
    if task.acceptance_criteria:
        yield "\n".join(
            ["Acceptance criteria:", *(f"- {each}" for each in task.acceptance_criteria)]
        )
    if task.output_schema is not None:
        schema = json.dumps(task.output_schema, sort_keys=True)
        yield (
            "The result is JSON that this JSON Schema describes, and nothing else; a command writes it to"
            f" the file that MAESTRO_RESULT names:\n{schema}"
        )
    if task.verification is not None:
        expected = task.verification.expected
        more = f"\nIts output contains: {expected}" if expected else ""
        yield f"The task is done when this command succeeds:\n{task.verification.command}{more}"


def _files(files: Files) -> Iterator[str]:
    names = {
        "Create": files.create,
        "Change": files.modify,
        "Delete": files.delete,
        "Rename": tuple(f"{each.source_path} to {each.target_path}" for each in files.move),
        "Read": files.read,
    }
    for what, paths in names.items():
        if paths:
            yield f"{what}: {', '.join(paths)}"
    if files.owned:
        yield "Write no other files: other tasks own them."


def _step(task: Task, at: int) -> str:
    step = task.steps[at]
    parts = [step.action, step.file, step.run and f"run: {step.run}", step.code_snippet]
    return f"{step.step}. " + "; ".join(each for each in parts if each)
