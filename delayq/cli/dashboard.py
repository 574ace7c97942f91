"""The command ``delayq dashboard``: serves the dashboard on its own."""

from __future__ import annotations

import asyncio
import os
import socket
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated, Any

import typer

import delayq
from delayq.admin.payloads import KEYS_VARIABLE
from delayq.cli.options import AsJson, LogLevels, Queues, RequiredUrl, payload_cipher
from delayq.cli.output import CommandFailed, report, tell
from delayq.cli.running import public_part, server_of
from delayq.cli.worker.child import log_to_stderr

if TYPE_CHECKING:
    from starlette.types import ASGIApp


def dashboard(
    queues: Queues = None,
    url: RequiredUrl = None,
    host: Annotated[str, typer.Option(help="The address to listen on.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="The port to listen on; 0 picks a free one.")
    ] = 8765,
    token: Annotated[
        str | None,
        typer.Option(
            envvar="DELAYQ_DASHBOARD_TOKEN",
            help="The token for operators. Without it, the dashboard is read-only.",
        ),
    ] = None,
    read_token: Annotated[
        str | None,
        typer.Option(
            envvar="DELAYQ_DASHBOARD_READ_TOKEN",
            help="The token for readers. Without it, anyone can read.",
        ),
    ] = None,
    title: Annotated[str, typer.Option(help="The title of the pages.")] = "delayq",
    proxy: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ADDRESS",
            help=(
                "The address or network of your proxy, which sets X-Forwarded-For and"
                " X-Forwarded-Proto: 10.0.0.7, 10.0.0.0/8. Repeatable. These headers are ignored"
                " from everyone else."
            ),
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Serve a web dashboard of the server's queues. Needs the extra `dashboard`.

    Shows all queues, or those that you name; encrypted payloads only if $DELAYQ_KEYS has their
    keys. Without a read token, anyone who can reach the port can read it. On a loopback address, it
    answers only requests for localhost.

    Example: `delayq dashboard --url redis://127.0.0.1:6379/0`
    """
    address = server_of(url)
    if find_spec("uvicorn") is None:
        raise CommandFailed("uvicorn is missing: pip install 'delayq[dashboard]'")
    names = [f"{queue.kind}:{queue.name}" for queue in queues or ()]
    log_to_stderr(LogLevels.INFO)
    payload_cipher()  # a key that is wrong is told before anything is served
    options = {
        "token": token,
        "read_token": read_token,
        "queues": names or None,
        "title": title,
        "keys": os.environ.get(KEYS_VARIABLE) or None,
    }
    asyncio.run(_serve(address, host, port, options, proxy or [], as_json=as_json))


async def _serve(
    address: str,
    host: str,
    port: int,
    options: dict[str, Any],
    proxies: list[str],
    *,
    as_json: bool,
) -> None:
    import uvicorn  # noqa: PLC0415 - an extra

    from delayq._dashboard.security import is_loopback  # noqa: PLC0415 - an extra

    with _listener(host, port) as listener:
        async with delayq.connect(address) as client:
            app: Any = delayq.dashboard(client, **options)
            if is_loopback(host):
                app = _only_localhost(app, host)
            # Live views never end by themselves.
            config = uvicorn.Config(
                app,
                host=host,
                port=port,
                log_level="warning",
                access_log=False,
                server_header=False,
                # Anyone on this machine could otherwise pass for any address.
                proxy_headers=bool(proxies),
                forwarded_allow_ips=proxies,
                timeout_graceful_shutdown=1,
            )
            server = uvicorn.Server(config)
            serving = asyncio.create_task(server.serve(sockets=[listener]))
            while not server.started and not serving.done():  # noqa: ASYNC110 - uvicorn has no event for it
                await asyncio.sleep(0.05)
            if server.started:
                listening = listener.getsockname()[1]
                netloc = f"[{host}]" if ":" in host else host
                label = public_part(address)
                read_only = options["token"] is None
                if options["read_token"] is None and not is_loopback(host):
                    tell(
                        f"anyone who can reach {host} can read all payloads: give"
                        " --read-token, or listen on 127.0.0.1"
                    )
                access = "read-only" if read_only else "operators log in with a token"
                report(
                    {
                        "url": f"http://{netloc}:{listening}/",
                        "server": label,
                        "read_only": read_only,
                    },
                    f"http://{netloc}:{listening}/ serves the queues of {label}, {access}",
                    as_json=as_json,
                )
            await serving
            if not server.started:
                raise CommandFailed(f"the dashboard could not start on {host}:{port}")


def _listener(host: str, port: int) -> socket.socket:
    """Return a bound socket. If uvicorn bound it, a port in use would end in a traceback."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        # As uvicorn does: the port of a server that was stopped a moment ago counts as free.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise CommandFailed(
            f"cannot listen on {host}:{port}: {error.strerror or error}; choose another --port or"
            " --host"
        ) from None
    return listener


def _only_localhost(app: ASGIApp, host: str) -> ASGIApp:
    """Refuse requests for other hosts, so that no page can read it through DNS rebinding."""
    from starlette.middleware.trustedhost import TrustedHostMiddleware  # noqa: PLC0415 - an extra

    names = ["localhost", "127.0.0.1", "[::1]", f"[{host}]" if ":" in host else host]
    return TrustedHostMiddleware(app, allowed_hosts=names, www_redirect=False)
