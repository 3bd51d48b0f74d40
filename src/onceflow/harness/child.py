"""A process of a run: it ends with the run, however that ends.

    python -m onceflow.harness.child PARENT MODULE[:FUNCTION] ARGUMENTS…

is `python -m MODULE ARGUMENTS…`, or a call of a function of it, as a child of the process PARENT.
"""

from __future__ import annotations

import importlib
import os
import runpy
import sys

from onceflow.service.driver import killed_with_parent


def main() -> None:
    parent, what, *arguments = sys.argv[1:]
    killed_with_parent()
    if os.getppid() != int(parent):  # the parent ended before the kernel was asked
        sys.exit(1)
    module, _, function = what.partition(":")
    sys.argv = [module, *arguments]
    if function:
        getattr(importlib.import_module(module), function)()
    else:
        runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
