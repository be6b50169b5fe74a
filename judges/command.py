"""The command coppice serve, which plugs a judge, an opponent or a speaker into a live run, and
invites one from another machine."""

import argparse
import contextlib
import sys
from pathlib import Path

import msgspec

from coppice.common import loop, options
from coppice.common.process import begin
from coppice.judges.base import Judge
from coppice.judges.serve import make_worker, serve
from coppice.wire.faults import Fault
from coppice.wire.keys import COLUMNS, Invitation, PeerKeys, RunKeys, connection, write_private
from coppice.wire.sockets import is_loopback

_EVERY_ADDRESS = ("0.0.0.0", "[::]", "*")
EXAMPLES = """\
  coppice serve my_judge:Brevity --run RUN              a judge of your own
  coppice serve pprm_rules --run RUN                    a built-in one
  coppice serve --run RUN --invite judge.brevity --to invitation.json
  coppice serve my_judge:Brevity --invite-file invitation.json"""


def parser() -> argparse.ArgumentParser:
    purpose = "Plug a judge, an opponent or a speaker into a live run, or invite one."
    parser = options.command_parser("coppice serve", purpose, EXAMPLES)
    add = parser.add_argument
    add("judge", nargs="?", metavar="JUDGE", help="module:Class, or a built-in name")
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--run", type=Path, metavar="RUN", help="folder of the live run")
    invited = "the invitation to a run on another machine"
    where.add_argument("--invite-file", type=Path, metavar="FILE", help=invited)
    option = "an argument of the class, its value in TOML; repeatable"
    add("--option", action="append", default=[], metavar="KEY=VALUE", help=option)
    add("--name", default=None, help="worker name (default: the judge's, with -plugin)")
    add = parser.add_argument_group("invitations (with --run)").add_argument
    service = "print an invitation to offer judge.NAME, player.NAME or speaker.NAME"
    add("--invite", metavar="SERVICE", help=service)
    columns = f"those that the invited judge may score (default: {','.join(COLUMNS)})"
    add("--columns", default=",".join(COLUMNS), metavar="A,B", help=columns)
    to = "write the invitation to this file, which only you can read"
    add("--to", type=Path, metavar="FILE", help=to)
    host = "the name or address by which the guest reaches this machine"
    add("--host", default="", help=host)
    revoke = "take an invitation back, by the name that --invite told"
    add("--revoke", metavar="KEY", help=revoke)
    return parser


def plug_in(arguments: list[str] | None = None) -> int:
    command = parser()
    flags = command.parse_args(arguments)
    begin()
    try:
        if flags.invite or flags.revoke:
            _change_invitations(flags)
            return 0
        if flags.judge is None:
            command.error("name the judge that is served, as module:Class or a built-in name")
        endpoint, keys = _reached(flags)
        worker = make_worker(flags.judge, dict(options.option(text) for text in flags.option))
    except (OSError, ValueError) as error:
        return options.gave_up("coppice serve", error)
    offered = worker.service + (f" {list(worker.columns)}" if isinstance(worker, Judge) else "")
    while True:
        print(f"serving {offered} to {endpoint}; Ctrl-C drains and leaves", flush=True)
        try:
            loop.run(serve([worker], flags.name or f"{worker.name}-plugin", endpoint, keys))
            return 0
        # the scheduler refused this worker, or a model server does not answer
        except (Fault, OSError) as error:
            before = endpoint
            with contextlib.suppress(FileNotFoundError, ValueError):
                endpoint, _ = _reached(flags)  # a resumed run has a new endpoint and the same keys
            if endpoint == before:
                return options.gave_up("coppice serve", error, 1)


def _reached(flags: argparse.Namespace) -> tuple[str, PeerKeys]:
    """Return the endpoint and the keys of the run folder or of the invitation."""
    if flags.invite_file is None:
        return connection(flags.run)
    invitation = Invitation.read(flags.invite_file)
    return invitation.endpoint, invitation


def _change_invitations(flags: argparse.Namespace) -> None:
    """Invite or revoke. Raises ValueError or OSError, which names the remedy."""
    if flags.run is None:
        raise ValueError("--invite and --revoke need --run: only the owner of a run invites to it")
    endpoint, _ = connection(flags.run)
    keys = RunKeys(flags.run / "keys")
    if flags.revoke:
        keys.revoke(flags.revoke)
        print(f"{flags.revoke} is revoked; a live run sends its worker away within seconds")
        return
    if flags.to is not None and flags.to.exists():
        raise FileExistsError(f"{flags.to} is there already: name another file, or remove it")
    columns = tuple(flags.columns.split(","))
    name, invitation = keys.invite(flags.invite, reachable(endpoint, flags.host), columns)
    text = msgspec.json.encode(invitation).decode()
    if flags.to is not None:
        write_private(flags.to, text + "\n")
    else:
        print(text, flush=True)
    # On the other stream, so that the invitation can be redirected to a file.
    print(
        f"{name} may offer {flags.invite} and nothing else, and as a judge score no other columns"
        f" than {', '.join(columns)} (--columns). The guest saves the line as a file that only the"
        " guest can read and runs coppice serve module:Class --invite-file FILE."
        f" Take it back: coppice serve --run {flags.run} --revoke {name}",
        file=sys.stderr,
    )
    if is_loopback(bound := invitation.endpoint):
        remedy = "for another machine start the run with --set scheduler.bind=tcp://ADDRESS:PORT"
        print(f"{bound} is reached from this machine alone: {remedy}", file=sys.stderr)


def reachable(endpoint: str, host: str) -> str:
    """Return the endpoint as the guest names it: tcp://0.0.0.0:5555 with the host gpu-1 is
    tcp://gpu-1:5555. Raises ValueError for a run on every address and no ``host``."""
    bound, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    if not host and bound in _EVERY_ADDRESS:
        remedy = "say with --host by which one the guest reaches it"
        raise ValueError(f"the run listens on every address ({endpoint}): {remedy}")
    return f"tcp://{host or bound}:{port}"
