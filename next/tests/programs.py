"""Python programs in processes of their own, that tests talk to line by line."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.python_processes import PythonProcess

if TYPE_CHECKING:
    from collections.abc import Sequence


class Program(PythonProcess):
    """A program that answers lines with lines."""

    def __call__(self, line: str = "") -> str:
        """Send a line, if there is one, and return the next line of the answer."""
        if line:
            assert self.stdin is not None
            self.stdin.write(f"{line}\n")
            self.stdin.flush()
        answer = self.line()
        assert answer, f"the program ended with {self.wait()}"
        return answer

    def end(self, *, check: bool = True) -> str:
        """Close its input, wait for its end, and return the rest of its output."""
        output, errors = self.communicate(timeout=60)
        assert not check or self.returncode == 0, errors or self.returncode
        return output

    def end_by_kill(self) -> str:
        """Kill it as the system does when memory is short; return the rest of its output."""
        self.kill()
        return self.end(check=False)

    def __exit__(self, *_: object) -> None:
        if self.stdout is not None and not self.stdout.closed:
            self.end_by_kill()


def run_together(code: str, arguments: Sequence[Sequence[object]]) -> list[str]:
    """Run programs at the same time to their ends, and return their outputs."""
    programs = [Program(code, *each, stderr=True) for each in arguments]
    return [each.end() for each in programs]
