"""Claims: published statements, the tests that verify them, and what a machine could not show.

A test states ``@pytest.mark.claim("LA-01", "packed prefill equals each sequence alone")``. Its
outcome and its measured figures travel as ``user_properties`` of the test report, so they survive
xdist and appear in JUnit files (``properties``). ``collector`` turns reports into the verdicts of
``model``, which ``report`` prints and writes:

* ``failed``: a test of the claim failed, in its set-up and tear-down too, or a set of ratios that
  its tests belong to did;
* ``verified``: every test of the claim ran and passed, and every such set is complete and in
  limits; that these are all tests is known from the collection of the whole suite, or an index
  (``selection``);
* ``partial``: nothing failed, but some test was left out, skipped, expected to fail, or never ran,
  or it is not known whether there are more, or a set lacks rows;
* ``not run``: no test of the claim ran.

``python -m pytest_kernel_claims.claims`` works on the files that ``--claims-json`` writes:
``merge A.json B.json`` sets them side by side, a column for each GPU; ``timings A.json``
(``timetable``) shows what was timed; ``audit A.json`` computes every figure and verdict again;
``verdict A.json B.json`` takes runs of one suite together (``union``); ``change A.json B.json``
tells which times differ beyond noise; ``index FILE`` (``selection``) writes down all tests of each
claim. ``shapes`` says what these files look like.
"""

from __future__ import annotations
