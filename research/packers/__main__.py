import argparse
import json
import sys

from coppice.research.packers import report

parser = argparse.ArgumentParser(prog="python -m coppice.research.packers")
parser.add_argument(
    "packers", nargs="+", help="ours, trl_row, trl_recurrent, grouper, or a file of Python"
)
parser.add_argument("--rounds", type=int, default=5, help="of packing, which take turns")
parser.add_argument("--json", action="store_true", help="print every value on stdout")
options = parser.parse_args()
values = report(options.packers, options.rounds, lambda line: print(line, file=sys.stderr))
if options.json:
    print(json.dumps(values))
