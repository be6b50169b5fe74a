"""A server of the Search-R1 retrieval protocol over an index folder, or over other servers
(methods.md 1.8): ``python -m coppice.judges.retriever.http_server --index DIR --port N``.

A malformed request is answered with status 422 and the reason.
"""

import argparse
from contextlib import AsyncExitStack

import msgspec
from aiohttp import web

from coppice.common import jsonl
from coppice.judges.config import RetrieverConfig
from coppice.judges.retriever.hot import Backend
from coppice.judges.retriever.worker import opened
from coppice.wire.messages import TOPK_MOST


class _Request(msgspec.Struct, forbid_unknown_fields=True):
    queries: list[str]
    topk: int | None = None
    return_scores: bool = False


def application(backend: Backend) -> web.Application:
    """Return the aiohttp application that answers POST /retrieve from ``backend``."""

    async def retrieve(request: web.Request) -> web.Response:
        try:
            body = msgspec.json.decode(await request.read(), type=_Request)
        except jsonl.MALFORMED as error:
            return web.json_response({"detail": jsonl.fault(error)}, status=422)
        topk = 3 if body.topk is None else body.topk
        if not 1 <= topk <= TOPK_MOST or not body.queries:
            wish = f"expected at least one query and a topk of 1 to {TOPK_MOST}"
            return web.json_response({"detail": wish}, status=422)
        found = await backend.search(body.queries, topk)
        listed = [[passage.listed(body.return_scores) for passage in row] for row in found]
        return web.json_response({"result": listed})

    app = web.Application()
    app.add_routes([web.post("/retrieve", retrieve)])
    return app


def main() -> None:
    purpose = (
        "Serve an index over the Search-R1 protocol. Section [retriever] explains the settings."
    )
    parser = argparse.ArgumentParser(description=purpose)
    add = parser.add_argument
    index = "index folder, or URLs of servers with commas between them"
    add("--index", required=True, dest="backend", metavar="INDEX", help=index)
    for field in msgspec.structs.fields(RetrieverConfig)[1:]:
        kind, default = type(field.default), field.default
        add(f"--{field.name}", type=kind, default=default, help="(default: %(default)s)")
    add("--host", default="127.0.0.1")
    add("--port", type=int, default=8000)
    options = vars(parser.parse_args())
    host, port = options.pop("host"), options.pop("port")
    try:
        config = msgspec.convert(options, RetrieverConfig)
    except msgspec.ValidationError as error:
        parser.error(str(error))

    async def served() -> web.Application:
        stack = AsyncExitStack()
        app = application(await stack.enter_async_context(opened(config)))
        app.on_cleanup.append(lambda app: stack.aclose())
        return app

    try:
        web.run_app(served(), host=host, port=port)
    except (OSError, ValueError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
