"""Fault tests: kill it, cut its power, fill its disk, lie to it, and look at what is left.

``python -m faults --list`` shows the rows, ``--quick`` runs a sample of each, ``--row 3`` runs one.
A row is a module that registers itself with ``registry.row``; what the rows share is in
``scenarios`` (the programs that are hurt), ``verify`` (what must be left of them), ``strace``,
``mounts`` and ``tools``; and, for runs through an executor, in ``child_processes`` (the processes),
``workflows`` (what they execute) and ``scene`` (the folder they share with whoever watches).
"""
