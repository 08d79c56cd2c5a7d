"""Optional baselines, from their PyPI packages at exact versions, called as their users would.

A peer that is absent, or of another version, skips the tests that need it. Every peer is gated on
the oracle before and after it is timed: see ``gate``. Where a baseline has a trap that would make
it wrong or charge it for work that is not its own, its adapter avoids or refuses the case:

* ``fla``: flash-linear-attention's operators, ``pip install linattn[peers]``;
* ``sglang``: two kernel files of SGLang, loaded from a wheel installed without dependencies.
"""
