"""How fast it is, beside the raw limits of the machine it runs on, and beside its peers.

Start it with ``make bench``.

Every contender runs in a process of its own, on a folder of its own. All of them take turns, round
after round, so that what slows the machine down for a while slows all of them down. Ratios are
taken within a round; the median over the rounds counts. Figures of different machines, or of
different runs on one machine, say nothing about each other.
"""
