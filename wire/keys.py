"""Who may do what in one run: a CURVE key pair for each role and for each invited peer, with the
services that its holder may offer.

``RUN/keys`` (0700) holds the scheduler's pair and one 0600 file per peer, ``peers/NAME.json``. The
scheduler reads that folder again when an unknown key knocks and at every heartbeat, so a key that
is minted is good at once, and a file that is deleted takes its key away.
"""

import contextlib
import logging
import os
import re
import secrets
from collections.abc import Iterator
from pathlib import Path

import msgspec
import zmq

log = logging.getLogger("wire.keys")

ROLES: dict[str, tuple[str, ...]] = {
    "actor": ("generate", "load"),
    "learner": ("train", "close"),
    "judge": ("judge", "player", "speaker"),
    "retriever": ("retrieve",),
}
"""The services that each role of a run's own processes may offer."""
INVITED = ("judge", "player", "speaker")
"""The services to which an outside peer can be invited. Actors and learners read and write the
run's folder, so they are never outside."""
RESERVED = re.compile(r"(scheduler|learner|actor|judges|judge-model|players|retriever)(-\d+)?")
"""The names of a run's own processes, which no guest may take."""
COLUMNS = ("think", "query", "answer", "process", "reward")
"""The columns that a guest may score if the invitation names no others."""
_INVITED = "invited-"
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,99}")
_SERVER_FILES = ("server_public", "server_secret")


@contextlib.contextmanager
def _of_started_run(folder: Path) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        told = f"no keys in {folder} ({error}): is this a run folder that was started?"
        raise FileNotFoundError(told) from None


class PeerKeys(msgspec.Struct, frozen=True):
    """What a worker needs to reach the scheduler (Z85 text): the scheduler's public key and a key
    pair of its own."""

    server_public: str
    public: str
    secret: str

    @classmethod
    def load(cls, folder: Path, role: str) -> "PeerKeys":
        """Read the keys of ``role`` in ``RUN/keys``. Raises FileNotFoundError, which says what to
        check, when there are none."""
        with _of_started_run(folder):
            path = folder / "peers" / f"{role}.json"
            grant = msgspec.json.decode(path.read_bytes(), type=Grant)
            return cls((folder / "server_public").read_text(), grant.public, grant.secret)


class Invitation(PeerKeys, frozen=True, kw_only=True):
    """All that an invited peer needs, as one line of JSON."""

    endpoint: str

    @classmethod
    def read(cls, path: Path) -> "Invitation":
        """Read an invitation. Raises ValueError, which names the remedy, when the file is none."""
        try:
            return msgspec.json.decode(path.read_bytes(), type=cls)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ValueError(
                f"{path} is no invitation ({error}): expected the line of coppice serve --invite"
            ) from None


class Grant(msgspec.Struct, frozen=True):
    """What the holder of one key may offer. In the grant of a role, a service without a dot stands
    for all its names: "judge" allows "judge.slate".

    secret: the secret half for a role of the run, "" for an invited peer, who alone has it.
    columns: those that a guest, an invited peer, may score; None for a role.
    """

    public: str
    services: tuple[str, ...]
    secret: str = ""
    columns: tuple[str, ...] | None = None

    def allows(self, service: str) -> bool:
        """Return whether the holder may offer ``service``."""
        kind = "" if self.guest else service.split(".", 1)[0]
        return service in self.services or kind in self.services

    @property
    def guest(self) -> bool:
        """Whether the holder was invited. Nothing that a guest says of itself is trusted."""
        return self.columns is not None


class RunKeys:
    """The scheduler's pair and the grants of its peers, as they are in ``folder``. Raises
    FileNotFoundError, which says what to check, when there are none."""

    def __init__(self, folder: Path):
        self.folder = folder
        with _of_started_run(folder):
            pair = ((folder / name).read_text() for name in _SERVER_FILES)
            self.server_public, self.server_secret = pair
        self._grants, self._files = dict[str, Grant](), dict[str, Grant]()
        self.reload()

    @classmethod
    def create(cls, folder: Path) -> "RunKeys":
        """Create the keys that ``folder`` lacks. A resumed run keeps its keys and invitations."""
        (folder / "peers").mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.chmod(0o700)
        if not all((folder / name).exists() for name in _SERVER_FILES):
            public, secret = (key.decode() for key in zmq.curve_keypair())
            write_private(folder / "server_secret", secret)
            write_private(folder / "server_public", public)
        keys = cls(folder)
        for role, services in ROLES.items():
            if not (folder / "peers" / f"{role}.json").exists():
                keys.mint(role, services, keep=True)
        return keys

    def mint(
        self, name: str, services: tuple[str, ...], keep: bool = False,
        columns: tuple[str, ...] | None = None,
    ) -> PeerKeys:  # fmt: skip
        """Create a key pair that may offer ``services``. The run keeps the secret half only if
        ``keep``; otherwise only the caller has it. columns: see ``Grant``."""
        public, secret = (key.decode() for key in zmq.curve_keypair())
        grant = Grant(public, services, secret if keep else "", columns)
        write_private(self._path(name), msgspec.json.encode(grant).decode())
        self.reload()
        return PeerKeys(self.server_public, public, secret)

    def invite(
        self, service: str, endpoint: str, columns: tuple[str, ...] = COLUMNS
    ) -> tuple[str, Invitation]:
        """Mint a pair for a guest that may offer ``service`` alone, and score ``columns`` alone if
        it is a judge. Returns the name by which it is revoked, and the invitation. Raises
        ValueError for a service of the run, or for one without a name."""
        kind, _, own = service.partition(".")
        if kind not in INVITED or not own or not _NAME.fullmatch(service):
            raise ValueError(
                f"no peer can be invited to {service!r}: name one service of the kinds"
                f" {', '.join(INVITED)}, such as judge.brevity"
            )
        if odd := [column for column in columns if not _NAME.fullmatch(column)]:
            raise ValueError(f"{odd} name no columns: expected such as think,query,answer")
        name = f"{_INVITED}{service}-{secrets.token_hex(3)}"
        pair = self.mint(name, (service,), columns=columns)
        return name, Invitation(pair.server_public, pair.public, pair.secret, endpoint=endpoint)

    def revoke(self, name: str) -> None:
        """Take a key away. A live scheduler sends its holder away within a heartbeat. Raises
        ValueError when there is no such key."""
        names = sorted(path.stem for path in (self.folder / "peers").glob("*.json"))
        if name not in names:
            raise ValueError(f"no key is named {name!r}: expected one of {', '.join(names)}")
        self._path(name).unlink()
        self.reload()

    def grant(self, public: str) -> Grant | None:
        """Return what the holder of this public key may do, as of the last ``reload``; None for a
        key that this run does not know."""
        return self._grants.get(public)

    def reload(self) -> None:
        """Read all grants anew. A damaged file grants nothing."""
        files = dict[str, Grant]()
        for path in (self.folder / "peers").glob("*.json"):
            try:
                grant = msgspec.json.decode(path.read_bytes(), type=Grant)
            except (FileNotFoundError, msgspec.DecodeError, UnicodeDecodeError):
                continue  # deleted meanwhile, or not written by ``mint``
            except OSError:  # of a network file system, for one: what the file said still holds
                if (held := self._files.get(path.name)) is None:
                    continue
                grant = held
            if path.stem.startswith(_INVITED) and grant.columns is None:  # by an older checkout
                grant = msgspec.structs.replace(grant, columns=COLUMNS)
            files[path.name] = grant
        self._files = files
        self._grants = {grant.public: grant for grant in files.values()}

    def callback(self, domain: str, key: bytes) -> bool:
        """Return whether a peer with this key may connect: the credentials provider of ZeroMQ's
        authenticator."""
        try:
            public = key.decode()
            if public not in self._grants:
                self.reload()
        # it would end the authenticator, and nobody would be admitted any more
        except (OSError, ValueError):
            log.exception("a key could not be looked up in %s", self.folder)
            return False
        return public in self._grants

    def _path(self, name: str) -> Path:
        if not _NAME.fullmatch(name):
            raise ValueError(
                f"{name!r} cannot name a key: expected letters, digits, '_', '-' and '.'"
            )
        return self.folder / "peers" / f"{name}.json"


def connection(run: Path, role: str = "judge") -> tuple[str, PeerKeys]:
    """Return the endpoint and a role's keys of a started run. Raises FileNotFoundError, which names
    the remedy."""
    try:
        return (run / "endpoint").read_text().strip(), PeerKeys.load(run / "keys", role)
    except (FileNotFoundError, NotADirectoryError) as error:
        fault = f"{run} is not a started run ({error}): start it with coppice launch first"
        raise FileNotFoundError(fault) from None


def write_private(path: Path, text: str) -> None:
    """Write a file that only its owner can read. It appears whole or not at all."""
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)
    draft.replace(path)
