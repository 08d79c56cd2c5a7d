"""Tile schedulers: which unit of work a CTA does, and in which order.

A unit is (sequence, value head, rows of V). Units are numbered with the rows running fastest, then
the heads, then the sequences. Every role of a CTA walks the same units on its own:

    for index in cutlass.range(block, units, ctas):
        unit = varlen.unit(index, batch, order, splits)

``ctas == units`` is one unit a CTA; fewer CTAs are persistent and take every ``ctas``-th unit. No
role waits for another CTA and nothing is counted with atomics, so the order changes no bit.
"""
