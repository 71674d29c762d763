"""What pyproject.toml cannot say.

On a package index, links in the README need the address of what they lead to. And the engine in C (view/dispatch) is
built where there is a compiler, once for every Python that has a global lock; without it duoka is slower.
"""

import re
import sysconfig
from pathlib import Path

from setuptools import Extension, setup

HERE = Path(__file__).parent
(home,) = re.findall('^Source = "(.*)"$', (HERE / "pyproject.toml").read_text(), re.MULTILINE)
readme = (HERE / "README.md").read_text(encoding="utf-8")
readme = re.sub(r"(!\[[^\]]*\]\()(?!https?:)", rf"\1{home}/raw/main/", readme)
readme = re.sub(r"(?<!!)(\[[^\]]*\]\()(?!https?:|#)", rf"\1{home}/blob/main/", readme)

engine = Extension(
    "duoka.view.dispatch._replay", ["src/duoka/view/dispatch/_replay.c"], py_limited_api=True, optional=True
)
limited = {} if sysconfig.get_config_var("Py_GIL_DISABLED") else {"bdist_wheel": {"py_limited_api": "cp310"}}

setup(
    long_description=readme,
    long_description_content_type="text/markdown",
    ext_modules=[engine],
    options=limited,
)
