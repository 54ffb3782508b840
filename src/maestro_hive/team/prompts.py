"""What a persona is told: what the graph says of a task, and the prompt that is made of it; pure."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from maestro_hive.maestro.state.strict_json import Json
    from maestro_hive.team.graph import Files, Task


def told(task: Task) -> dict[str, Json]:
    """Return what the graph says of a task to its persona, without the words around it.

    That is part of the task's identity, and the prompt is not: other words execute nothing again.
    """
    if task.prompt is not None:
        texts: dict[str, Json] = {"prompt": task.prompt}
    else:
        texts = {"description": task.description.strip(), "context": (task.context or "").strip()}
    rules: dict[str, Json] = {
        "files": _files_told(task.files),
        "steps": [
            [each.step, each.action, each.file, each.run, each.code_snippet] for each in task.steps
        ],
        "acceptance_criteria": list(task.acceptance_criteria),
    }
    return texts | {name: value for name, value in rules.items() if value}


def prompt_of(given: dict[str, Json]) -> str:
    """Return the prompt of a task by what it is executed with: its own, or one made of what it is told.

    Files, steps, criteria and the verification are named in both cases, and the answers that it got.
    """
    says = given["told"]
    parts = [says["prompt"]] if "prompt" in says else _texts(given)
    answers = "".join(
        f"\nYou asked: {each['asked']}\nThe answer: {each['answer']}\n"
        for each in given.get("answers", ())
    )
    return "\n\n".join([*parts, *_rules(given)]) + "\n" + answers


def with_feedback(prompt: str, feedback: Sequence[str]) -> str:
    """Return a prompt with what failed before."""
    if not feedback:
        return prompt
    return f"{prompt}\nWhat failed before:\n\n" + "\n\n".join(feedback) + "\n"


def _texts(given: dict[str, Json]) -> list[str]:
    says = given["told"]
    texts = [f"{given['id']}: {given['title']}".strip(), says["description"], says["context"]]
    return [each for each in texts if each]


def _rules(given: dict[str, Json]) -> Iterator[str]:
    says = given["told"]
    if "files" in says:
        yield "\n".join(_files(says["files"]))
    if "steps" in says:
        yield "\n".join(["Steps:", *map(_step, says["steps"])])
    if "acceptance_criteria" in says:
        yield "\n".join(
            ["Acceptance criteria:", *(f"- {each}" for each in says["acceptance_criteria"])]
        )
    if "output_schema" in given:
        schema = json.dumps(given["output_schema"], sort_keys=True)
        yield (
            "The result is JSON that this JSON Schema describes, and nothing else; a command writes it to"
            f" the file that MAESTRO_RESULT names:\n{schema}"
        )
    if "verification" in given:
        check = given["verification"]
        more = f"\nIts output contains: {check['expected']}" if check["expected"] else ""
        yield f"The task is done when this command succeeds:\n{check['command']}{more}"


def _files_told(files: Files) -> dict[str, list[Json]]:
    names: dict[str, list[Json]] = {
        "create": list(files.create),
        "modify": list(files.modify),
        "delete": list(files.delete),
        "move": [[each.source_path, each.target_path] for each in files.move],
        "read": list(files.read),
    }
    return {name: paths for name, paths in names.items() if paths}


def _files(files: dict[str, list[Json]]) -> Iterator[str]:
    words = {
        "create": "Create",
        "modify": "Change",
        "delete": "Delete",
        "move": "Rename",
        "read": "Read",
    }
    for name, word in words.items():
        if name in files:
            paths = (" to ".join(each) if name == "move" else each for each in files[name])
            yield f"{word}: {', '.join(paths)}"
    if files.keys() - {"read"}:
        yield "Write no other files: other tasks own them."


def _step(step: list[Json]) -> str:
    number, action, file, run, code = step
    parts = [action, file, run and f"run: {run}", code]
    return f"{number}. " + "; ".join(each for each in parts if each)
