"""tox reads this file: GPU environments look for their GPU before anything is installed."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tox.plugin import impl
from tox.tox_env.api import ToxEnv
from tox.tox_env.errors import Fail

sys.path.insert(0, str(Path(__file__).parent / "plugins"))

from pytest_kernel_claims import FAMILIES, driver


@impl
def tox_on_install(tox_env: ToxEnv, arguments: object, section: str, of_type: str) -> None:
    """Stop before gigabytes are fetched for a machine that cannot run the tests."""
    name = tox_env.conf.name
    if name.removeprefix("emulated-") in FAMILIES and name not in FAMILIES:
        raise Fail(f"{name} is no environment: tox -e emulated -- --gpu-arch={name}")
    wanted = [one for factor in name.split("-") for one in FAMILIES.get(factor, ())]
    if not wanted:
        return
    found = driver.visible()
    fitting = [n for n, one in enumerate(found.capabilities) if one in wanted]
    if 0 in fitting:  # on which tests run
        return
    needed = " or ".join(f"{major}.{minor}" for major, minor in wanted)
    advice = "What works without one: tox -e demo, tox -e cpu"
    if fitting:
        listed = [one.strip() for one in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")]
        number = listed[fitting[0]] if len(listed) > fitting[0] and listed[0] else fitting[0]
        advice = f"Tests run on the first one: set CUDA_VISIBLE_DEVICES={number}"
    raise Fail(
        f"{name} needs a GPU of compute capability {needed}; here: {found}. "
        f"Nothing was installed. {advice}"
    )
