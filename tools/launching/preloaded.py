"""Imported by the fork server alone (forks.py), before its first fork: everything that the
processes of a run import. This module imports torch."""

import gc
import importlib
import os
import sys

from coppice.common.process import die_with

MODULES = """
coppice.actors.engines.local coppice.actors.worker coppice.judges.exact_match coppice.judges.serve
coppice.judges.retriever.encoder coppice.judges.retriever.index coppice.judges.retriever.worker
coppice.judges.slate coppice.learner.main coppice.scheduler.main coppice.tools.launching.set_up
""".split()

if "multiprocessing.forkserver" in sys.orig_argv[-1]:
    os.setsid()  # Ctrl-C and a closed terminal reach the launcher alone
    die_with(os.getppid())
    for module in MODULES:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()  # a fork's collections write to no page that it shares
