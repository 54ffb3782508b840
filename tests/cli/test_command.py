"""The command ``maestro`` itself: help, versions, folders, errors, exit codes, terminals."""

from __future__ import annotations

import fcntl
import os
import re
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import maestro_hive
from maestro_hive import Hive
from maestro_hive.cli.app import VERBS, Verb
from tests.cli.processes import (
    COMMAND,
    answer,
    complaint,
    environment,
    filled,
    in_terminal,
    maestro,
)
from tests.python_processes import run_python
from tests.tables import for_each
from tests.timing import least

ESCAPE = "\x1b"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return filled(tmp_path / "state")


# --- what it says of itself ---


def test_it_prints_its_version() -> None:
    done = maestro("--version")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"maestro, version {maestro_hive.__version__}\n"


def test_the_installed_script_is_the_same_command() -> None:
    script = Path(sys.executable).with_name("maestro")
    if not script.exists():
        pytest.skip("maestro-hive is not installed here")
    done = subprocess.run([script, "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"maestro, version {maestro_hive.__version__}\n"


@pytest.mark.parametrize("asked", ["--version", "--help"])
def test_version_and_help_load_no_database(asked: str) -> None:
    code = (
        "import sys\n"
        f"sys.argv = ['maestro', '{asked}']\n"
        "from maestro_hive.cli import main\n"
        "try: main()\n"
        "except SystemExit:\n"
        "    heavy = {'apsw', 'asyncio', 'jsonschema', 'rich', 'maestro_hive.hive'}\n"
        "    print(*(heavy & set(sys.modules)), file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout
    assert done.stderr == "\n"


def test_a_list_of_runs_loads_nothing_of_what_executes_them(tmp_path: Path) -> None:
    with Hive(tmp_path) as hive:
        hive.runs()
    code = (
        "import sys\n"
        f"sys.argv = ['maestro', 'runs', '--json', '--store', {str(tmp_path)!r}]\n"
        "from maestro_hive.cli import main\n"
        "try: main()\n"
        "except SystemExit: print(*sys.modules, file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stderr.split())
    assert "maestro_hive.cli.show" in loaded
    assert loaded.isdisjoint({"asyncio", "jsonschema", "rich", "maestro_hive.hive.hive"})
    assert loaded.isdisjoint({"maestro_hive.maestro.state.events", "maestro_hive.engine.config"})


def test_the_version_is_printed_at_once() -> None:
    """The promise is 200 ms, and it waits for nothing: all of that is CPU time."""

    def used() -> float:
        spent = resource.getrusage(resource.RUSAGE_CHILDREN)
        return spent.ru_utime + spent.ru_stime

    def seconds() -> float:
        before = used()
        subprocess.run([*COMMAND, "--version"], stdout=subprocess.DEVNULL, check=True)
        return used() - before

    assert least(seconds, 0.2, tries=10) < 0.2


def test_its_help_names_every_verb_in_a_section_and_shows_examples() -> None:
    done = maestro("--help")
    assert (done.returncode, done.stderr) == (0, "")
    for word in (*VERBS, "Usage: maestro", "The state folder:", "Examples:", "--version", "75"):
        assert word in done.stdout
    assert maestro("-h").stdout == done.stdout


@for_each("verb", VERBS.values(), ids=list(VERBS))
def test_the_summary_of_a_verb_is_the_first_line_of_its_help(verb: Verb) -> None:
    command = verb.load()
    assert command.name == verb.name
    assert command.help is not None
    assert command.help.splitlines()[0] == verb.summary


@for_each("verb", VERBS)
def test_the_help_of_each_verb_teaches(verb: str) -> None:
    done = maestro(verb, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    shown = " ".join(done.stdout.split())
    for word in ("--store", "--debug", "Examples:"):
        assert word in shown
    for word in ("MAESTRO_STATE_DIR", "/var/maestro/state"):  # else the module's Hive decides
        assert (word in shown) is (verb not in ("run", "worker"))
    assert f"maestro {verb}" in shown.partition("Examples:")[2]
    assert re.findall(r"--\S+ _\S+", shown) == []  # the name of a function of ours


def test_no_arguments_show_the_help_and_are_wrong_use() -> None:
    done = maestro()
    assert (done.returncode, done.stdout) == (2, "")
    assert "Usage: maestro" in done.stderr
    assert maestro("checkpoints").returncode == 2


# --- wrong use ---


def test_a_mistyped_verb_is_wrong_use_and_the_right_one_is_suggested() -> None:
    assert "'doctor'" in complaint(maestro("docter"), 2)
    assert "'reset'" in complaint(maestro("breakers", "rest"), 2)


def test_an_unknown_verb_is_an_error_with_all_verbs() -> None:
    message = complaint(maestro("xyzzy"), 2)
    assert all(name in message for name in VERBS)
    assert "open, reset" in complaint(maestro("breakers", "xyzzy"), 2)


@for_each(
    "arguments",
    [["backup"], ["doctor", "--nope"], ["--nope"], ["backup", "a", "b"], ["gc", "--keep", "0"]],
)
def test_wrong_arguments_are_one_sentence_that_names_the_help(arguments: list[str]) -> None:
    assert "--help'" in complaint(maestro(*arguments), 2)


@pytest.mark.parametrize("place", ["", "postgresql://host/db"])
def test_what_is_no_folder_is_no_store(place: str) -> None:
    assert "--store" in complaint(maestro("doctor", "--store", place), 2)


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (["runs", "extra"], "Got unexpected extra argument (extra). See 'maestro runs --help'."),
        (["completion"], "Choose from: bash, zsh, fish. See 'maestro completion --help'."),
    ],
)
def test_the_sentence_about_wrong_arguments_ends_before_the_next(
    arguments: list[str], sentence: str
) -> None:
    done = maestro(*arguments)
    assert done.stderr.endswith(f"{sentence}\n")
    assert done.stderr.count("\n") == 1


def test_a_folder_that_does_not_exist_is_said_not_to(tmp_path: Path) -> None:
    def why(place: str) -> str:
        return complaint(maestro("runs", "--store", tmp_path / place))

    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    assert "is not a state folder: it does not exist" in why("nowhere")
    assert "is not a state folder: it is not a folder" in why("file")
    assert "is not a state folder: it has no journal.db" in why("empty")


def test_a_run_id_that_cannot_be_one_is_wrong_use(folder: Path) -> None:
    assert "'../x'" in complaint(maestro("purge", "../x", "--yes", "--store", folder), 2)


# --- which folder ---


@pytest.mark.parametrize("order", ["before", "after", "both"])
def test_the_folder_may_be_given_before_and_after_the_verb(folder: Path, order: str) -> None:
    chosen = ["--store", str(folder)]
    before = {"before": chosen, "after": [], "both": ["--store", "/nowhere"]}[order]
    after = [] if order == "before" else chosen
    done = maestro(*before, "breakers", *after)
    assert done.returncode == 0
    assert done.stderr.startswith(f"store: {folder} (from --store)\n")


def test_a_group_takes_the_folder_too(folder: Path) -> None:
    assert answer(maestro("checkpoints", "--store", folder, "list", "--json"))["store"] == str(
        folder
    )


def test_the_environment_chooses_the_folder_and_that_is_printed(folder: Path) -> None:
    done = maestro("breakers", MAESTRO_STATE_DIR=str(folder))
    assert done.returncode == 0
    assert done.stderr.startswith(f"store: {folder} (from MAESTRO_STATE_DIR)\n")


def test_without_a_choice_the_default_has_its_stand_in(tmp_path: Path) -> None:
    if Path("/var/maestro/state/journal.db").exists():
        pytest.skip("the default folder is in use on this machine")
    stand_in = filled(tmp_path / ".maestro" / "state")
    done = maestro("breakers", "--json", HOME=str(tmp_path), MAESTRO_STATE_DIR="")
    assert answer(done)["store"] == str(stand_in)
    assert done.stderr == f"store: {stand_in} (the default)\n"


@pytest.mark.parametrize("verb", ["breakers", "gc", "doctor"])
@pytest.mark.parametrize("what", ["missing", "empty", "a file"])
def test_reading_what_is_no_state_folder_creates_nothing(
    tmp_path: Path, verb: str, what: str
) -> None:
    place = tmp_path / "place"
    if what == "empty":
        place.mkdir()
    elif what == "a file":
        place.write_text("mine")
    before = sorted(tmp_path.rglob("*"))
    message = complaint(maestro(verb, "--store", place))
    assert str(place) in message
    assert "not a state folder" in message
    assert sorted(tmp_path.rglob("*")) == before


# --- trouble ---


@pytest.mark.parametrize("where", ["before", "after"])
def test_debug_shows_the_traceback_of_an_error(tmp_path: Path, where: str) -> None:
    missing = ["--store", str(tmp_path / "missing")]
    words = ["--debug", "gc", *missing] if where == "before" else ["gc", *missing, "--debug"]
    done = maestro(*words)
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("maestro: ")


BROKEN = """
import sys
from maestro_hive.cli import main, maintenance
maintenance.backup_command.callback = lambda *_, **__: 1 / 0
sys.argv = ["maestro", "backup", "x", *sys.argv[1:]]
main()
"""


def test_an_internal_error_is_one_sentence_too() -> None:
    done = run_python(BROKEN)
    assert "ZeroDivisionError" in complaint(done)
    assert "--debug" in done.stderr
    done = run_python(BROKEN, "--debug")
    assert done.returncode == 1
    assert "Traceback" in done.stderr


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_reader_that_closes_the_pipe_is_no_error(tmp_path: Path, unbuffered: str) -> None:
    """The output is larger than a pipe holds, and only its first bytes are read."""
    folder = filled(tmp_path / "state")
    for number in range(1500):
        name = f"000001.{number:08d}~never~{'long' * 20}-{number}.json"
        (folder / "checkpoints" / "run").mkdir(exist_ok=True)
        (folder / "checkpoints" / "run" / name).touch()
    process = subprocess.Popen(
        [*COMMAND, "checkpoints", "list", "--store", folder],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(PYTHONUNBUFFERED=unbuffered),
    )
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.read(10)
    process.stdout.close()
    errors = process.stderr.read().decode()
    process.stderr.close()
    assert process.wait(timeout=60) == 1
    assert errors.splitlines() == [f"store: {folder} (from --store)"]


def test_even_short_output_to_a_closed_pipe_is_silent(folder: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [*COMMAND, "--help"], stdout=writing, stderr=subprocess.PIPE, text=True, check=False
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (1, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_an_answer_that_cannot_be_written_is_an_error(folder: Path) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [*COMMAND, "doctor", "--json", "--store", folder],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            env=environment(),
        )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "maestro: No space left on device"


def test_ctrl_c_is_one_line_and_130(folder: Path) -> None:
    """The verb waits, because another process is inside a write."""
    with (folder / "journal.lock").open("r+b") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        process = subprocess.Popen(
            [*COMMAND, "breakers", "open", "api", "--new", "--store", folder],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(),
        )
        assert process.stderr is not None
        assert process.stderr.readline() == f"store: {folder} (from --store)\n"
        time.sleep(0.5)  # until it stands in the queue, most likely; either way it must be one line
        process.send_signal(signal.SIGINT)
        out, errors = process.communicate(timeout=60)
    assert (process.returncode, out, errors) == (130, "", "maestro: interrupted\n")


def test_what_is_not_utf8_does_not_break_it(tmp_path: Path) -> None:
    folder = filled(tmp_path / "日")
    done = subprocess.run(
        [*COMMAND, "breakers", "--store", folder],
        capture_output=True,
        encoding="latin-1",
        check=False,
        env=environment(PYTHONIOENCODING="latin-1"),
    )
    assert done.returncode == 0
    assert f"{tmp_path}/\\u65e5 " in done.stderr


# --- terminals ---


def test_in_a_terminal_there_are_colours_unless_they_are_disabled(folder: Path) -> None:
    assert maestro("breakers", "open", "api", "--new", "--store", folder).returncode == 0
    seen = in_terminal("breakers", "--store", folder)
    assert seen.returncode == 0
    assert f"{ESCAPE}[2mstore: " in seen.text
    assert f"{ESCAPE}[31mopen" in seen.text
    assert "name" in seen.text
    plain = in_terminal("breakers", "--store", folder, NO_COLOR="1")
    assert ESCAPE not in plain.text
    assert "open" in plain.text


def test_a_table_is_as_wide_as_the_terminal_at_most(folder: Path) -> None:
    maestro("breakers", "open", "api", "--new", "--store", folder)
    for columns in (40, 60, 100):
        seen = in_terminal("breakers", "--store", folder, columns=columns, NO_COLOR="1")
        table = seen.text.splitlines()[1:]
        assert max(map(len, table)) <= columns


def test_in_a_pipe_there_is_one_plain_line_per_item(folder: Path) -> None:
    for name in ("a", "b"):
        maestro("breakers", "open", name, "--new", "--store", folder)
    done = maestro("breakers", "--store", folder, FORCE_COLOR="")
    lines = done.stdout.splitlines()
    assert [line.split("\t")[:2] for line in lines] == [["a", "open"], ["b", "open"]]
    assert ESCAPE not in done.stdout + done.stderr
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT.*\+00:00", lines[0].split("\t")[3])


# --- completion ---


def completed(typed: str, **changes: str) -> list[str]:
    asked = {"_MAESTRO_COMPLETE": "bash_complete", "COMP_WORDS": typed}
    done = maestro(**asked, COMP_CWORD=str(len(typed.split(" ")) - 1), **changes)
    assert (done.returncode, done.stderr) == (0, "")
    return [line.partition(",")[2] for line in done.stdout.splitlines() if line]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_gets_its_script(shell: str) -> None:
    done = maestro("completion", shell)
    assert (done.returncode, done.stderr) == (0, "")
    assert f"_MAESTRO_COMPLETE={shell}_complete" in done.stdout


def test_a_real_shell_completes_with_the_script(folder: Path) -> None:
    """As a shell does: source the script, call what it registered, look at what it offers."""
    script = (
        'eval "$(maestro completion bash)"\n'
        "COMP_WORDS=(maestro breakers re); COMP_CWORD=2\n"
        "_maestro_completion maestro\n"
        'echo "${COMPREPLY[@]}"\n'
    )
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "--norc", "-c", script],
        capture_output=True,
        text=True,
        check=False,
        env=environment(PATH=path),
    )
    assert done.stdout.split() == ["reset"], done


def test_verbs_runs_breakers_and_checkpoints_are_completed(folder: Path) -> None:
    maestro("breakers", "open", "anthropic", "--new", "--store", folder)
    there = {"MAESTRO_STATE_DIR": str(folder)}
    assert completed("maestro ch") == ["checkpoints"]
    assert completed("maestro purge r", **there) == ["run"]
    assert completed("maestro purge x", **there) == []
    assert completed("maestro breakers reset a", **there) == ["anthropic"]
    assert completed(f"maestro --store {folder} purge r") == ["run"]
    (folder / "checkpoints" / "run").mkdir()
    (folder / "checkpoints" / "run" / "000001.00000001~never~before-it.json").touch()
    assert completed("maestro checkpoints show b", **there) == ["before-it"]


@pytest.mark.parametrize("typed", ["maestro purge r", "maestro checkpoints show b"])
def test_without_a_store_nothing_is_completed_and_nothing_is_printed(
    tmp_path: Path, typed: str
) -> None:
    assert completed(typed, MAESTRO_STATE_DIR=str(tmp_path / "missing")) == []
    (tmp_path / "journal.db").write_text("not one")
    assert completed(typed, MAESTRO_STATE_DIR=str(tmp_path)) == []
    assert [path.name for path in tmp_path.iterdir()] == ["journal.db"]
