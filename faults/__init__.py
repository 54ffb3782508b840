"""Fault tests: kill processes, cut the power, fill disks, corrupt files, and check what is left.

``python -m faults --list`` shows the rows, ``--quick`` runs a sample of each, ``--row 3`` runs one.
A row is a function registered with ``registry.row``; ``registry.MODULES`` names its module. The
rows share ``scenarios`` (the programs that faults are injected into), ``verify`` (what must be left
of them), ``strace``, ``mounts`` and ``tools``; those that execute steps in real processes share
``child_processes`` and ``executor_workflows``. ``twin`` generates workflows and compares those that
were killed and resumed with those that were not.
"""
