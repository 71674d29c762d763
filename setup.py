"""What pyproject.toml cannot say: on a package index, links in the README need the address of what they lead to."""

import re
from pathlib import Path

from setuptools import setup

HERE = Path(__file__).parent
(home,) = re.findall('^Source = "(.*)"$', (HERE / "pyproject.toml").read_text(), re.MULTILINE)
readme = (HERE / "README.md").read_text(encoding="utf-8")
readme = re.sub(r"(!\[[^\]]*\]\()(?!https?:)", rf"\1{home}/raw/main/", readme)
readme = re.sub(r"(?<!!)(\[[^\]]*\]\()(?!https?:|#)", rf"\1{home}/blob/main/", readme)

setup(long_description=readme, long_description_content_type="text/markdown")
