"""Run a Supervisor over children named on the command line; the seam is its list of commands."""

import argparse
import ctypes
import json
import sys
from pathlib import Path

from encodepool_worker.logs import setup_logs
from encodepool_worker.supervisor import ChildSpec, Patience, Supervisor

parser = argparse.ArgumentParser()
parser.add_argument("--child", action="append", type=json.loads, required=True)
parser.add_argument("--patience", type=json.loads, default={})
parser.add_argument("--termination-log", type=Path)
parser.add_argument("--state-dir", type=Path)
parser.add_argument("--temp-dir", type=Path)
parser.add_argument("--report-modules", action="store_true")
parser.add_argument("--subreaper", action="store_true", help="inherit orphans, as PID 1 does")
args = parser.parse_args()
if args.subreaper:
    PR_SET_CHILD_SUBREAPER = 36
    assert ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
setup_logs("info", role="supervisor")
if args.report_modules:
    heavy = sorted({"torch", "grpc", "zmq", "numpy", "mooncake", "transformers"} & set(sys.modules))
    print(f"heavy modules: {heavy}", flush=True)
supervisor = Supervisor(
    [ChildSpec(name, role, tuple(command), rank) for name, role, rank, command in args.child],
    patience=Patience(**args.patience),
    termination_log=args.termination_log,
    state_dir=args.state_dir,
    group=2,
    incarnation=5,
    temp_dir=args.temp_dir,
)
sys.exit(supervisor.run())
