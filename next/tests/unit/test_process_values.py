"""Values and exit functions of a process, and its event loop."""

from __future__ import annotations

import os
import threading

from maestro_hive.kernel.process import PerProcess
from tests.python_processes import run_python

IN_ORDER = """
from maestro_hive.kernel.process import run_at_exit
run_at_exit(2, lambda: print("stores"))
run_at_exit(0, lambda: print("runs"))
run_at_exit(1, lambda: print("copies"))
"""

HANGING_IN_A_THREAD = """
import asyncio, time
from maestro_hive.kernel.process import run_async

async def main():
    for _ in range(50):
        asyncio.get_running_loop().create_task(asyncio.to_thread(time.sleep, 600))
    await asyncio.sleep(0.05)
    print(await asyncio.to_thread(int, "42"))

run_async(main())
"""


def test_all_threads_of_a_process_share_one_value() -> None:
    value: PerProcess[object] = PerProcess(object)
    barrier = threading.Barrier(8)
    seen: list[object] = []

    def look() -> None:
        barrier.wait(30)
        seen.append(value())

    threads = [threading.Thread(target=look) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(seen) == 8
    assert set(seen) == {value()}


IN_A_FORK = """
import os
from maestro_hive.kernel.process import PerProcess

closed = []
value = PerProcess(object, inherited=closed.append)
mine = value()
child = os.fork()
if child == 0:
    os._exit(closed != [mine] or value() is mine)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), closed, value() is mine)
"""


def test_a_forked_child_makes_its_own_value_and_gives_back_the_inherited_one() -> None:
    assert run_python(IN_A_FORK, check=True).stdout == "0 [] True\n"


def test_a_value_that_was_not_made_is_not_given_back_in_a_child() -> None:
    value: PerProcess[int] = PerProcess(os.getpid, inherited=lambda _: None)
    value.reset()
    assert value() == os.getpid()


def test_exit_functions_are_called_in_their_order() -> None:
    assert run_python(IN_ORDER, check=True).stdout == "runs\ncopies\nstores\n"


def test_threads_that_hang_delay_neither_the_others_nor_the_end_of_the_program() -> None:
    assert run_python(HANGING_IN_A_THREAD, check=True, timeout=60).stdout == "42\n"
