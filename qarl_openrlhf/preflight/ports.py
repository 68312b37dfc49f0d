"""Ports: who holds one, and whether a Ray head answers at the one that ``RAY_ADDRESS`` names.

Ports of the run itself (its own Ray head, the learners' group, vLLM, the weight sync) are free ones that the system gives.
"""

import os
import re

import psutil

from qarl_openrlhf.runtime import ResourceError


class PortError(ResourceError):
    """A port that is held by another process, or where the wrong one answers. Names the port and its holder."""


def holder(port: int) -> str:
    """What listens on a TCP port of this host, as words: "python3 (process 12)"."""
    try:
        listening = [c for c in psutil.net_connections("tcp") if c.laddr and c.status == psutil.CONN_LISTEN]
    except psutil.AccessDenied:
        return "a process that this user may not see"
    found = [c for c in listening if c.laddr.port == port]
    for connection in found:
        if connection.pid is None:
            continue
        try:
            return f"{psutil.Process(connection.pid).name()} (process {connection.pid})"
        except psutil.NoSuchProcess:
            return f"process {connection.pid}, which has ended since"
    return "a process of another user" if found else "no process that still listens"


def require_ray_head(address: str, timeout_s: float = 30.0) -> None:
    """PortError unless a gRPC server, as a Ray head is, answers at ``host:port``; other forms of an address are left to Ray.

    Ray itself tries for over two minutes and then ends the process without an error.
    """
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not port.isdigit() or os.environ.get("RAY_USE_TLS", "0") != "0":
        return
    import grpc

    with grpc.insecure_channel(address) as channel:
        try:
            grpc.channel_ready_future(channel).result(timeout=timeout_s)
            return
        except grpc.FutureTimeoutError:
            pass
    raise PortError(
        f"RAY_ADDRESS {address}: no Ray head answered within {timeout_s:g} s. {_what_is_at(host, int(port))}. Give the address "
        "that `ray start --head` printed (`ray status --address HOST:PORT` tries it), or unset RAY_ADDRESS: the run then starts "
        "a head of its own"
    )


def _what_is_at(host: str, port: int) -> str:
    if host in ("127.0.0.1", "localhost", *(a.address for each in psutil.net_if_addrs().values() for a in each)):
        return f"Port {port} of this host is held by {holder(port)}"
    return f"Port {port} of {host} is closed, behind a firewall, or another program's"


def named(error: BaseException) -> PortError | None:
    """A PortError for an "address in use" of torch or the system, naming the holder; None for other errors."""
    text = str(error)
    if "EADDRINUSE" not in text and "address already in use" not in text.lower():
        return None
    match = re.search(r"port:? *(\d+)", text)
    if match is None:
        return None
    port = int(match[1])
    return PortError(f"port {port} is in use by {holder(port)}: end it, or start the run again, which takes another port")
