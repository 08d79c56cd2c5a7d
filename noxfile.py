"""Workflows over the environments of tox.ini: no environment and no dependency is defined here.

nox -s verify                 what this machine can verify: cpu, then the GPU it has; claims merged
nox -s compare -- REF [ENV]   timings of the working tree against those of a commit, on one GPU
nox -s evidence               tables of the pages from the runs in conformance/evidence
nox -s release                cpu, then sdist and wheel in dist/, from a clean checkout
"""

import sys
import tempfile
from pathlib import Path

import nox

ROOT = Path(__file__).parent
sys.path.insert(0, str(ROOT / "plugins"))

from pytest_kernel_claims import FAMILIES, driver

EVIDENCE = ROOT / "conformance" / "evidence"
GPU_ENVIRONMENTS = ("sm90", "sm100")

PAGES = {
    "docs/claims.md": ("merge",),
    "docs/performance.md": ("timings",),
    "README.md": ("summary", "--rows", str(EVIDENCE / "front_page.txt")),
}
"""Pages that hold what the runs in ``EVIDENCE`` say, and the command that writes it."""

nox.options.default_venv_backend = "none"
nox.options.sessions = ["verify"]


def tox(session: nox.Session, environment: str, *arguments: str) -> None:
    """Runs one tox environment of the checkout that is the current directory."""
    tail = ("--", *arguments) if arguments else ()
    session.run(sys.executable, "-m", "tox", "run", "-e", environment, *tail, external=True)


def claims(session: nox.Session, *arguments: str) -> None:
    """Runs the command line of the checkout's own plugin."""
    command = [sys.executable, "-m", "pytest_kernel_claims.claims", *arguments]
    session.run(*command, external=True, env={"PYTHONPATH": str(ROOT / "plugins")})


def gpu_environment() -> str | None:
    """The tox environment of the first GPU of this machine, None where there is none."""
    found = driver.visible().capabilities
    if not found:
        return None
    return next((name for name in GPU_ENVIRONMENTS if found[0] in FAMILIES[name]), None)


@nox.session
def verify(session: nox.Session) -> None:
    """Runs cpu and the environment of the GPU there is, then says what they show together."""
    environments = ["cpu", *filter(None, [gpu_environment()])]
    for environment in environments:
        tox(session, environment)
    found = [one for name in environments for one in Path(".tox", name).glob("claims*.json")]
    claims(session, "verdict", *map(str, sorted(found)))
    if len(environments) == 1:
        session.warn("no supported GPU here: nothing that needs one was verified")


@nox.session
def compare(session: nox.Session) -> None:
    """Times a commit in a worktree of its own, then the working tree against it."""
    if not 1 <= len(session.posargs) <= 2:
        session.error("usage: nox -s compare -- REF [ENVIRONMENT]")
    reference = session.posargs[0]
    environment = session.posargs[1] if len(session.posargs) == 2 else gpu_environment()
    if environment is None:
        session.error("compare: timings need a supported GPU, and none was found")
    timed = ["-m", "perf", f"--benchmark-storage={(ROOT / '.benchmarks').as_uri()}", "conformance"]
    with tempfile.TemporaryDirectory() as folder:
        tree = str(Path(folder) / "tree")
        session.run("git", "worktree", "add", "--detach", tree, reference, external=True)
        try:
            with session.chdir(tree):
                tox(session, environment, "--benchmark-autosave", *timed)
        finally:
            session.run("git", "worktree", "remove", "--force", tree, external=True)
    tox(session, environment, "--benchmark-compare", *timed)


@nox.session
def evidence(session: nox.Session) -> None:
    """Audits all recorded runs, then writes what they say between the markers of ``PAGES``.

    A run that differs from its readings stops the session before anything is written. With
    ``-- --check`` the pages are only compared.
    """
    runs = sorted(map(str, EVIDENCE.glob("*/*.json")))
    if not runs:
        session.error(f"evidence: no run in {EVIDENCE.relative_to(ROOT)}")
    for run in runs:
        claims(session, "audit", run)
    for page, command in PAGES.items():
        claims(session, *command, "--into", page, *session.posargs, *runs)


@nox.session
def release(session: nox.Session) -> None:
    """Tests and builds a clean checkout; uploading stays a person's decision."""
    changes = session.run("git", "status", "--porcelain", external=True, silent=True)
    if changes:
        session.error(f"release: the checkout has uncommitted changes:\n{changes}")
    tox(session, "cpu")
    tox(session, "package")
