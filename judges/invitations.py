"""coppice serve --invite and --revoke: what a judge on another machine needs to reach this run, and
no more.

They belong to coppice serve because it stands at both ends: the owner of the run invites with it and
the guest serves with it.
"""

import argparse
import sys
from pathlib import Path

import msgspec

from coppice.wire.keys import RunKeys, write_private
from coppice.wire.sockets import is_loopback

_EVERY_ADDRESS = ("0.0.0.0", "[::]", "*")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of invitations to those of coppice serve."""
    group = parser.add_argument_group("invitations (with --run)")
    group.add_argument(
        "--invite",
        metavar="SERVICE",
        help="print an invitation to offer judge.NAME, player.NAME or speaker.NAME",
    )
    group.add_argument(
        "--to",
        type=Path,
        metavar="FILE",
        help="write the invitation to this file, which only you can read",
    )
    group.add_argument(
        "--host", default="", help="the name or address by which the guest reaches this machine"
    )
    group.add_argument(
        "--revoke", metavar="KEY", help="take an invitation back, by the name that --invite told"
    )


def run(asked: argparse.Namespace) -> int:
    """Invite or revoke. Raises ValueError or OSError, which names the remedy."""
    if asked.run is None:
        raise ValueError("--invite and --revoke need --run: only the owner of a run invites to it")
    try:
        keys, endpoint = (
            RunKeys.load(asked.run / "keys"),
            (asked.run / "endpoint").read_text().strip(),
        )
    except (FileNotFoundError, NotADirectoryError) as error:
        raise FileNotFoundError(
            f"{asked.run} is not a started run ({error}): start it with coppice launch first"
        ) from None
    if asked.revoke:
        keys.revoke(asked.revoke)
        print(f"{asked.revoke} is revoked; a live run sends its worker away within seconds")
        return 0
    if asked.to is not None and asked.to.exists():
        raise FileExistsError(f"{asked.to} is there already: name another file, or remove it")
    name, invitation = keys.invite(asked.invite, reachable(endpoint, asked.host))
    text = msgspec.json.encode(invitation).decode()
    if asked.to is not None:
        write_private(asked.to, text + "\n")
    else:
        print(text, flush=True)
    # On the other stream, so that the invitation can be redirected to a file.
    print(
        f"{name} may offer {asked.invite} and nothing else. The guest saves the line as a file that only the guest can read and runs"
        f" coppice serve module:Class --invite-file FILE. Take it back: coppice serve --run {asked.run} --revoke {name}",
        file=sys.stderr,
    )
    if is_loopback(invitation.endpoint):
        print(
            f"{invitation.endpoint} is reached from this machine alone: for another machine start the run with"
            " --set scheduler.bind=tcp://ADDRESS:PORT",
            file=sys.stderr,
        )
    return 0


def reachable(endpoint: str, host: str) -> str:
    """Return the endpoint as the guest names it. Raises ValueError when the run listens on every
    address and ``host`` is "".

    >>> reachable("tcp://0.0.0.0:5555", "gpu-1")
    'tcp://gpu-1:5555'
    """
    bound, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    if not host and bound in _EVERY_ADDRESS:
        raise ValueError(
            f"the run listens on every address ({endpoint}): say with --host by which one the guest reaches it"
        )
    return f"tcp://{host or bound}:{port}"
