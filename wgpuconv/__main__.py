"""``python -m wgpuconv`` is the command ``wgpuconv``."""

from .cli import main

main()
