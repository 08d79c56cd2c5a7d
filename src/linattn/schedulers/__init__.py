"""Tile schedulers: which unit of work a CTA does, and in which order.

A unit is (sequence, value head, rows of V). Units are numbered with the rows running fastest, then
the heads, then the sequences. Every role of a CTA walks the same units on its own:

    index, done = block, 0
    while index < units:
        unit = varlen.unit(index, ...)
        ...
        done += 1
        index = persistent.following(index, done, ...)

``ctas == units`` is one unit a CTA. Fewer CTAs are persistent: they take every ``ctas``-th unit
(``persistent``), or what ``balanced`` gives them. No role waits for another CTA and nothing is
counted with atomics, so the order changes no bit.
"""
